from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Weights = dict[str, NDArray[np.float32]]


@pytest.fixture
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache, configuration and hub folders of this test alone."""
    for variable in ("DFLASH_CACHE", "DFLASH_CONFIG", "HF_HUB_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path


def _tokens() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "he", "Ġt"]


def _interleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The order of q and k rows that GGUF writers produce."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture
def make_gguf() -> Callable[[Path], Weights]:
    """Writes a tiny Q4_1 Llama and returns its exact weights under their transformers names."""

    def make(path: Path) -> Weights:
        random = np.random.default_rng(7)
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(LAYERS)
        writer.add_context_length(256)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-5)
        tokens = _tokens()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
        writer.add_token_merges(["h e", "Ġ t"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(CHAT_TEMPLATE)
        exact: Weights = {}

        def add(name: str, hf_name: str, rows: int, columns: int, kind: Kind, heads: int) -> None:
            values = random.normal(0, 0.3, (rows, columns)).astype(np.float32)
            blocks = gguf.quants.quantize(values, kind)
            exact[hf_name] = gguf.quants.dequantize(blocks, kind)
            if heads:
                blocks = gguf.quants.quantize(_interleave(values, heads), kind)
            writer.add_tensor(name, blocks, raw_dtype=kind)

        def add_norm(name: str, hf_name: str) -> None:
            exact[hf_name] = random.normal(1, 0.1, HIDDEN).astype(np.float32)
            writer.add_tensor(name, exact[hf_name])

        add("token_embd.weight", "model.embed_tokens.weight", len(tokens), HIDDEN, Kind.Q8_0, 0)
        add_norm("output_norm.weight", "model.norm.weight")
        query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        for n in range(LAYERS):
            old, new = f"blk.{n}", f"model.layers.{n}"
            add_norm(f"{old}.attn_norm.weight", f"{new}.input_layernorm.weight")
            add_norm(f"{old}.ffn_norm.weight", f"{new}.post_attention_layernorm.weight")
            for gguf_part, part, rows, columns, heads in (
                ("attn_q", "self_attn.q_proj", query, HIDDEN, HEADS),
                ("attn_k", "self_attn.k_proj", key, HIDDEN, KV_HEADS),
                ("attn_v", "self_attn.v_proj", key, HIDDEN, 0),
                ("attn_output", "self_attn.o_proj", HIDDEN, query, 0),
                ("ffn_gate", "mlp.gate_proj", INNER, HIDDEN, 0),
                ("ffn_up", "mlp.up_proj", INNER, HIDDEN, 0),
                ("ffn_down", "mlp.down_proj", HIDDEN, INNER, 0),
            ):
                gguf_name, name = f"{old}.{gguf_part}.weight", f"{new}.{part}.weight"
                add(gguf_name, name, rows, columns, Kind.Q4_1, heads)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return exact

    return make
