"""Builds a lean target tensor by tensor, so that at most one is there unquantised."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from dflash_local.errors import WeightsError

from .torch_cache import TargetCache
from .torch_embedding import DenseEmbedding, Embedding, Int8Embedding
from .torch_families import Family
from .torch_lean import LeanLayer, LeanTarget, LeanWeights
from .torch_linear import DenseLinear, Linear, LinearMaker, fits_half
from .torch_prequant import PackedWeight, joined, read_packed
from .torch_rope import RopeTable, target_frequencies
from .torch_target import TargetShape
from .torch_weights import TensorReader


class PackedMaker(Protocol):
    """Turns a weight that is in four bits already into a product."""

    def __call__(self, name: str, weight: PackedWeight, bias: torch.Tensor | None = None) -> Linear:
        """``name`` is for reports."""
        ...


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
    packed: PackedMaker | None = None,
    embed_bits: int = 16,
    halved: bool = False,
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
        packed: stores what the checkpoint holds in four bits; None where it holds nothing so.
        embed_bits: 8 or 16 for the rows of the input embedding.
        halved: whether those rows are kept in fp16 where it can hold them, whatever states are
            computed in.

    Raises:
        WeightsError: a tensor is missing or of another shape.
    """
    prefix = "model." if "model.embed_tokens.weight" in reader else ""
    hidden, rows = shape.hidden_size, shape.embedding_rows
    rows_name, head_name = f"{prefix}embed_tokens.weight", "lm_head.weight"
    matrix = reader.read(rows_name, (rows, hidden))
    tied = bool(config.tie_word_embeddings)
    if tied:
        head_product = head("head", matrix)
    else:
        head_product = _product(reader, "head", [head_name], [rows], hidden, None, head, packed)
    shared = tied and isinstance(head_product, DenseLinear)
    # Rows in 8 bits beside a head that is the same matrix would only add to it.
    small = embed_bits == 8 and not shared
    norm = reader.read(f"{prefix}norm.weight", (hidden,))
    embedding: Embedding
    if small:
        embedding = Int8Embedding(matrix)
    else:
        rows_fit = halved and fits_half(matrix)
        embedding = DenseEmbedding(matrix.half() if rows_fit else matrix, norm.dtype)
    del matrix
    weights = LeanWeights(
        embedding=embedding,
        layers=[
            _layer(reader, f"{prefix}layers.{index}.", index, config, family, shape, body, packed)
            for index in range(len(shape.layers))
        ],
        norm=norm,
        head=head_product,
        tied=shared,
        eps=float(config.rms_norm_eps),
    )
    dim = shape.layers[0].head_dim
    frequencies, factor = target_frequencies(config, dim)
    rope = RopeTable(frequencies, factor, capacity, dtype=norm.dtype, device=norm.device)
    return LeanTarget(weights, shape, taps, cache, rope)


def _layer(
    reader: TensorReader,
    place: str,
    index: int,
    config: Any,
    family: Family,
    shape: TargetShape,
    body: LinearMaker,
    packed: PackedMaker | None,
) -> LeanLayer:
    numbers, hidden = shape.layers[index], shape.hidden_size
    middle, dim = int(config.intermediate_size), numbers.head_dim
    wide, narrow = numbers.heads * dim, numbers.kv_heads * dim

    def product(name: str, parts: dict[str, int], columns: int, *, bias: bool) -> Linear:
        return _product(
            reader,
            f"layers.{index}.{name}",
            [f"{place}{part}.weight" for part in parts],
            list(parts.values()),
            columns,
            [f"{place}{part}.bias" for part in parts] if bias else None,
            body,
            packed,
        )

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


def _product(
    reader: TensorReader,
    name: str,
    weights: list[str],
    outputs: list[int],
    columns: int,
    biases: list[str] | None,
    maker: LinearMaker,
    packed: PackedMaker | None,
) -> Linear:
    """One product of weights that read the same input, as the checkpoint or the maker stores it."""
    bias = None
    if biases is not None:
        bias = _joined([reader.read(b, (n,)) for b, n in zip(biases, outputs, strict=True)])
    shapes = [(rows, columns) for rows in outputs]
    if packed is not None:
        found = [read_packed(reader, w, s) for w, s in zip(weights, shapes, strict=True)]
        whole = [weight for weight in found if weight is not None]
        if len(whole) == len(found):
            return packed(name, joined(whole), bias)
        if whole:
            raise WeightsError(
                f"{name} is packed only in part.", "Choose the 16-bit repository instead."
            )
    return maker(
        name, _joined([reader.read(w, s) for w, s in zip(weights, shapes, strict=True)]), bias
    )


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
