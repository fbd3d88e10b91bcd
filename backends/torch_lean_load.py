"""Builds a lean target tensor by tensor, so that at most one is there unquantised."""

from __future__ import annotations

from typing import Any

import torch

from .torch_cache import TargetCache
from .torch_families import Family
from .torch_lean import LeanLayer, LeanTarget, LeanWeights
from .torch_linear import Linear, LinearMaker, can_pack, dense
from .torch_rope import RopeTable, target_frequencies
from .torch_target import TargetShape
from .torch_weights import TensorReader


def load_lean(
    reader: TensorReader,
    config: Any,
    family: Family,
    shape: TargetShape,
    taps: tuple[int, ...],
    cache: TargetCache,
    *,
    capacity: int,
    body: LinearMaker,
    head: LinearMaker,
) -> LeanTarget:
    """A lean target from a checkpoint.

    Args:
        reader: the checkpoint.
        config: transformers' config of it.
        family: its entry in the table of families.
        shape: its numbers.
        taps: layers whose output is kept.
        cache: K/V for every layer.
        capacity: positions that may be rotated.
        body: stores the layers' products.
        head: stores the output head.

    Raises:
        WeightsError: a tensor is missing or of another shape.
    """
    prefix = "model." if "model.embed_tokens.weight" in reader else ""
    hidden, rows = shape.hidden_size, shape.embedding_rows
    embedding = reader.read(f"{prefix}embed_tokens.weight", (rows, hidden))
    tied = bool(config.tie_word_embeddings)
    output = embedding if tied else reader.read("lm_head.weight", (rows, hidden))
    head_product = head("head", output)
    del output
    weights = LeanWeights(
        embedding=embedding,
        layers=[
            _layer(reader, f"{prefix}layers.{index}.", index, config, family, shape, body)
            for index in range(len(shape.layers))
        ],
        norm=reader.read(f"{prefix}norm.weight", (hidden,)),
        head=head_product,
        tied=tied and head is dense and not can_pack(embedding),
        eps=float(config.rms_norm_eps),
    )
    dim = shape.layers[0].head_dim
    frequencies, factor = target_frequencies(config, dim)
    rope = RopeTable(frequencies, factor, capacity, dtype=embedding.dtype, device=embedding.device)
    return LeanTarget(weights, shape, taps, cache, rope)


def _layer(
    reader: TensorReader,
    place: str,
    index: int,
    config: Any,
    family: Family,
    shape: TargetShape,
    body: LinearMaker,
) -> LeanLayer:
    numbers, hidden = shape.layers[index], shape.hidden_size
    middle, dim = int(config.intermediate_size), numbers.head_dim
    wide, narrow = numbers.heads * dim, numbers.kv_heads * dim

    def product(name: str, parts: dict[str, int], columns: int, *, bias: bool) -> Linear:
        weight = _joined(
            [reader.read(f"{place}{p}.weight", (r, columns)) for p, r in parts.items()]
        )
        added = (
            _joined([reader.read(f"{place}{p}.bias", (r,)) for p, r in parts.items()])
            if bias
            else None
        )
        return body(f"layers.{index}.{name}", weight, added)

    def norm(name: str, size: int = hidden) -> torch.Tensor:
        return reader.read(f"{place}{name}.weight", (size,))

    mlp_bias = family.mlp_bias(config)
    return LeanLayer(
        input_norm=norm("input_layernorm"),
        qkv=product(
            "qkv",
            {"self_attn.q_proj": wide, "self_attn.k_proj": narrow, "self_attn.v_proj": narrow},
            hidden,
            bias=family.qkv_bias(config),
        ),
        q_norm=norm("self_attn.q_norm", dim) if family.head_norms else None,
        k_norm=norm("self_attn.k_norm", dim) if family.head_norms else None,
        out=product("out", {"self_attn.o_proj": hidden}, wide, bias=family.out_bias(config)),
        post_norm=norm("post_attention_layernorm"),
        gate_up=product(
            "gate_up", {"mlp.gate_proj": middle, "mlp.up_proj": middle}, hidden, bias=mlp_bias
        ),
        down=product("down", {"mlp.down_proj": hidden}, middle, bias=mlp_bias),
    )


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
