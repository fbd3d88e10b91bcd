"""A tiny pair that chats: random words, a byte-level tokenizer, a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tiny import loop_pair

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_pair(folder: Path, positions: int = 2048) -> tuple[Path, Path]:
    """The tiny loop pair of 128 ids with a tokenizer of ASCII characters beside the target."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    long = {"max_position_embeddings": positions}
    target, draft = loop_pair(folder, long, long)
    letters = [chr(33 + i) for i in range(94)] + ["Ġ", "Ċ"]
    vocab = {letter: index for index, letter in enumerate(letters)}
    vocab |= {f"<|extra_{i}|>": i for i in range(len(vocab), 125)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|mask|>"])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target, draft
