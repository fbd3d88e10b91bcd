"""Turns a GGUF file of the Llama architecture into a folder that transformers and MLX can load.

Two things differ between the formats besides the names. GGUF stores the rows of the q and k
projections interleaved for its own rotary embedding, so ``unpermute`` puts them back (it moves
whole rows, hence works on raw quantised blocks too). And weights are blocks: a dequantised value is
an fp16 scale times a small integer (plus an fp16 offset), which fp32 holds exactly. Of the demo
target's values fp16 would round 42 % and bf16 79 %, so the folder is fp32: the fp32 run is then the
quantised model itself, and a bf16 run is one rounding away from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.errors import WeightsError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


def tensor_name(name: str) -> str:
    """``blk.4.attn_q.weight`` -> ``model.layers.4.self_attn.q_proj.weight``."""
    match name.split("."):
        case ["blk", number, part, "weight"] if part in _LAYER and number.isdigit():
            return f"model.layers.{number}.{_LAYER[part]}.weight"
        case [part, "weight"] if part in _TOP:
            return f"{_TOP[part]}.weight"
    raise WeightsError(f"The GGUF tensor {name} belongs to no Llama model.")


def unpermute(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a q or k projection in the order that rotating halves needs.

    Args:
        rows: ``(heads * head_dim, anything)``, values or raw blocks.
        heads: query heads for q, key/value heads for k.
    """
    half = rows.shape[0] // heads // 2
    paired = rows.reshape(heads, half, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def heads_to_unpermute(name: str, heads: int, kv_heads: int) -> int:
    """How many heads the rows of this GGUF tensor interleave; 0 where rows are in order."""
    if name.endswith("attn_q.weight"):
        return heads
    return kv_heads if name.endswith("attn_k.weight") else 0


def convert(source: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write weights, configuration and tokenizer of ``source`` into ``folder``, which exists.

    ``progress`` hears bytes written of ``model.safetensors``, and their total.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        facts = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise WeightsError(f"{source} is no readable GGUF file: {error}.") from error
    if facts.get("general.architecture") != "llama":
        raise WeightsError(
            f"{source} holds a {facts.get('general.architecture')} model; only llama is read here."
        )
    names = [tensor.name for tensor in reader.tensors]
    config = _config(facts, tied="output.weight" not in names)
    _write_json(folder / "config.json", config)
    stop = [config["eos_token_id"]]
    tokens = facts["tokenizer.ggml.tokens"]
    if "<|endoftext|>" in tokens:
        stop.append(tokens.index("<|endoftext|>"))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": list(dict.fromkeys(stop)),
            "pad_token_id": config["pad_token_id"],
        },
    )
    _write_tokenizer(facts, folder)
    _write_weights(reader.tensors, config, folder / "model.safetensors", progress)


def _config(facts: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """``config.json`` of a ``LlamaForCausalLM`` from the file's own metadata."""
    heads = int(facts["llama.attention.head_count"])
    hidden = int(facts["llama.embedding_length"])
    theta = _short(facts["llama.rope.freq_base"])
    eos = int(facts["tokenizer.ggml.eos_token_id"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": int(facts["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(facts.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(facts.get("llama.rope.dimension_count", hidden // heads)),
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(facts["llama.context_length"]),
        "hidden_act": "silu",
        "rms_norm_eps": _short(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": int(facts.get("tokenizer.ggml.bos_token_id", eos)),
        "eos_token_id": eos,
        "pad_token_id": int(facts.get("tokenizer.ggml.padding_token_id", eos)),
        "dtype": "float32",
    }


def _short(value: float) -> float:
    """The shortest decimal of a number that was stored as fp32 (1e-05, not 9.9999997e-06)."""
    import numpy as np

    return float(str(np.float32(value)))


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE as the file describes it, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise WeightsError(f"The GGUF tokenizer kind {kind[0]}/{kind[1]} is not supported.")
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    pairs = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token
        for token, kind_of_token in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
        if kind_of_token == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    special = {
        f"{role}_token": tokens[int(facts[f"tokenizer.ggml.{key}_token_id"])]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in facts
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            **special,
            "add_bos_token": bool(facts.get("tokenizer.ggml.add_bos_token", False)),
            "add_prefix_space": False,
            "chat_template": facts["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(facts["llama.context_length"]),
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _write_weights(
    tensors: Iterable[Any], config: dict[str, Any], path: Path, progress: Callable[[int, int], None]
) -> None:
    """A safetensors file, one tensor in memory at a time."""
    entries = sorted(((tensor_name(t.name), t) for t in tensors), key=lambda entry: entry[0])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in entries:
        size = 4 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)
    done = 0
    progress(done, offset)
    with path.open("wb") as file:
        file.write(len(blob).to_bytes(8, "little") + blob)
        for values in _values((tensor for _, tensor in entries), config):
            file.write(values.data)
            done += values.nbytes
            progress(done, offset)
        file.flush()
        os.fsync(file.fileno())


def _values(tensors: Iterable[Any], config: dict[str, Any]) -> Iterator[NDArray[np.float32]]:
    """Each tensor's exact values, little-endian fp32, rows in order."""
    import numpy as np
    from gguf.quants import dequantize

    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        heads = heads_to_unpermute(
            tensor.name, config["num_attention_heads"], config["num_key_value_heads"]
        )
        if heads:
            values = unpermute(values, heads)
        yield np.ascontiguousarray(values, dtype="<f4")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """JSON in UTF-8, whatever the console's encoding."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
