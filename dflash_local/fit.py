"""Whether a pair fits: bytes of weights, draft, caches and workspace against what is free here.

Reads configs and safetensors headers only; no framework is loaded. The formula counts what the
backends allocate, so it says for a context what the peak will be, and which context is the longest
that still fits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_local.draft_config import DraftConfig, read_draft_config
from dflash_local.errors import DflashError, DoesNotFit
from dflash_local.free_memory import Room, room
from dflash_local.pairs import Files, Pair
from dflash_local.weights import folder_shapes, read_json, weight_files

DEFAULT_CONTEXT = 8192
PREFILL_SLICE = 512
"""Rows of one prefill step; its activations are the workspace."""

_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
_ON_LOAD = {"nf4": 0.5625, "int8": 1.02, "4bit": 0.5625, "8bit": 1.0625}
"""Bytes per weight after quantisation while loading, scales included."""
_UNKNOWN_DRAFT = 2**30
_BEHIND_WINDOW = 768
"""Rows that a draft's window keeps beyond what it sees: a margin for going back, and one slice."""
_DEMO_WEIGHTS = 134_515_008


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a pair takes, by purpose."""

    weights: int
    draft: int
    cache: int
    """The target's K/V for the whole context."""
    draft_cache: int
    workspace: int
    """Activations, masks and scores of the widest step, at their peak."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.draft + self.cache + self.draft_cache + self.workspace


@dataclass(frozen=True, slots=True)
class Fit:
    """A need held against the room of this machine."""

    need: Need
    context: int
    room: Room
    largest_context: int
    """Positions that still fit, up to the model's own limit; 0 when the weights alone do not."""

    @property
    def fits(self) -> bool:
        """Whether all of it can be held."""
        return self.need.total <= self.room.free

    def __str__(self) -> str:
        n = self.need
        parts = (
            f"weights {gigabytes(n.weights)} + draft {gigabytes(n.draft)} + K/V for "
            f"{self.context:,} tokens {gigabytes(n.cache + n.draft_cache)} + workspace "
            f"{gigabytes(n.workspace)} = {gigabytes(n.total)}"
        )
        return f"{parts}; {gigabytes(self.room.free)} free on {self.room.device}"


@dataclass(frozen=True, slots=True)
class _Target:
    """The numbers of a target that memory depends on."""

    weights: int
    hidden: int
    inner: int
    kv_layers: int
    kv_heads: int
    head_dim: int
    groups: int
    """Query heads per K/V head."""
    vocab: int
    limit: int
    fixed: int = 0
    """Bytes of recurrent state, whatever the context."""
    kv_width: float | None = None
    """Bytes per number of K/V, scales included; None is as computed."""


def fit(
    target_dir: Path,
    draft_dir: Path | None,
    *,
    backend: str,
    dtype: str | None = None,
    quantize: str | None = None,
    context: int | None = None,
    draft_window: int | None = None,
    kv_bits: int | None = None,
    free: Room | None = None,
) -> Fit:
    """What the pair in two folders needs on this machine.

    Args:
        target_dir: folder of the target; only config.json and file headers are read.
        draft_dir: folder of the draft, or None.
        backend: ``mlx`` or ``torch``.
        dtype: as for ``load``.
        quantize: quantisation at load, as for ``load``.
        context: positions; None is the backend's default.
        draft_window: as for ``load``.
        kv_bits: as for ``load``.
        free: the room to hold it against; measured when None.

    Raises:
        WeightsError: files are missing or damaged.
    """
    found = free or room(backend)
    width = _width(dtype, found)
    target = _read_target(
        target_dir, width, quantize, doubled=found.kind == "cpu" and backend == "torch"
    )
    if kv_bits == 8:
        target = replace(target, kv_width=1.0 + 4.0 / target.head_dim)
    draft = None if draft_dir is None else read_draft_config(draft_dir).limited(draft_window)
    draft_bytes = 0
    if draft_dir is not None and draft is not None:
        draft_bytes = _draft_weights(draft_dir, draft, backend, width)
    asked = context or min(DEFAULT_CONTEXT, target.limit)
    return _fit(target, draft, draft_bytes, asked, width, backend, found)


def fit_pair(pair: Pair, files: Files, *, backend: str, context: int | None = None) -> Fit | None:
    """The same before anything is downloaded, from the registry's numbers; None where it has none.

    Good to some 10 %: exact sizes come with the files.
    """
    if pair.shape is None or not files.approx_bytes:
        return None
    shape, found = pair.shape, room(backend)
    weights = files.approx_bytes
    if files.source == "demo":  # kept converted, and loaded in the device's own type
        weights = int(_DEMO_WEIGHTS * _width(None, found))
    target = _Target(
        weights=weights,
        hidden=shape.hidden,
        inner=3 * shape.hidden,
        kv_layers=shape.kv_layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        groups=max(1, shape.hidden // (shape.kv_heads * shape.head_dim)),
        vocab=152_000,
        limit=pair.context or DEFAULT_CONTEXT,
    )
    draft_bytes = int((pair.draft.approx_bytes or _UNKNOWN_DRAFT) * _width(None, found) / 2)
    asked = context or min(DEFAULT_CONTEXT, target.limit)
    return _fit(target, None, draft_bytes, asked, _width(None, found), backend, found)


def check(
    target_dir: Path,
    draft_dir: Path | None,
    *,
    backend: str,
    dtype: str | None = None,
    quantize: str | None = None,
    context: int | None = None,
    draft_window: int | None = None,
    kv_bits: int | None = None,
    free: Room | None = None,
) -> Fit | None:
    """Refuse a load that cannot end well; None where it cannot be judged.

    Files that cannot be read are left to the loader, whose messages name them. ``DFLASH_FIT=off``
    skips the check.

    Raises:
        DoesNotFit: with all numbers and the largest context that would fit.
    """
    if os.environ.get("DFLASH_FIT", "").lower() in ("off", "0", "no"):
        return None
    try:
        result = fit(
            target_dir,
            draft_dir,
            backend=backend,
            dtype=dtype,
            quantize=quantize,
            context=context,
            draft_window=draft_window,
            kv_bits=kv_bits,
            free=free,
        )
    except DflashError:
        return None
    if not result.fits:
        raise refusal(target_dir.name, result)
    return result


def refusal(name: str, result: Fit) -> DoesNotFit:
    """The error for a pair that does not fit."""
    if result.largest_context >= 256:
        advice = f"Use --context {result.largest_context}, the largest that fits"
    else:
        advice = "Choose a smaller model or stronger quantisation (dflash-local list --fits)"
    return DoesNotFit(
        f"{name} does not fit: {result}.",
        f"{advice}, or free memory by closing programs; DFLASH_FIT=off loads anyway.",
    )


def gigabytes(size: float) -> str:
    """Bytes for a person."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _fit(
    target: _Target,
    draft: DraftConfig | None,
    draft_bytes: int,
    context: int,
    width: float,
    backend: str,
    found: Room,
) -> Fit:
    def need(positions: int) -> Need:
        return _need(target, draft, draft_bytes, positions, width, backend)

    low, high = 0, max(context, target.limit)
    if need(1).total > found.free:
        high = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if need(middle).total <= found.free else (low, middle - 1)
    return Fit(need(context), context, found, min(low, target.limit))


def _need(
    target: _Target,
    draft: DraftConfig | None,
    draft_bytes: int,
    context: int,
    width: float,
    backend: str,
) -> Need:
    row = 2 * target.kv_layers * target.kv_heads * target.head_dim
    draft_row, rows, taps = 0, context, 0
    if draft is not None:
        draft_row = 2 * draft.layers * draft.kv_heads * draft.head_dim
        taps = len(draft.target_layer_ids)
        if draft.context_window is not None:
            rows = min(context, draft.context_window + _BEHIND_WINDOW)
        rows += draft.block_size
    step = min(PREFILL_SLICE, context)
    block = draft.block_size if draft else 1
    masks = 0
    if backend == "torch":  # an additive mask, its repeats per query head, and two of bools
        masks = int(((target.groups + 1) * width + 2) * step * context)
    activations = step * (2 * target.inner + (6 + 2 * taps) * target.hidden) * width
    scores = 2 * block * target.vocab * 4
    return Need(
        weights=target.weights + target.fixed,
        draft=draft_bytes,
        cache=int(row * context * (target.kv_width or width)),
        draft_cache=int(draft_row * rows * width),
        workspace=int(masks + activations + scores),
    )


def _read_target(folder: Path, width: float, quantize: str | None, *, doubled: bool) -> _Target:
    config = read_json(folder / "config.json")
    inner_config = config.get("text_config")
    text: Mapping[str, Any] = inner_config if isinstance(inner_config, dict) else config
    heads = int(text.get("num_attention_heads") or 1)
    hidden = int(text.get("hidden_size") or 0)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or hidden // heads)
    layers = int(text.get("num_hidden_layers") or 0)
    kinds = text.get("layer_types") or ["full_attention"] * layers
    recurrent = sum(kind == "linear_attention" for kind in kinds)
    return _Target(
        weights=_target_weights(folder, config, text, width, quantize)
        + (_fused(folder, width) if doubled and quantize is None else 0),
        hidden=hidden,
        inner=int(text.get("intermediate_size") or text.get("moe_intermediate_size") or 4 * hidden),
        kv_layers=layers - recurrent,
        kv_heads=kv_heads,
        head_dim=head_dim,
        groups=max(1, heads // kv_heads),
        vocab=int(text.get("vocab_size") or 0),
        limit=int(text.get("max_position_embeddings") or DEFAULT_CONTEXT),
        fixed=2 * recurrent * _recurrent_state(text),
    )


def _target_weights(
    folder: Path,
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    width: float,
    quantize: str | None,
) -> int:
    """Bytes of the weights once loaded: as stored when quantised, else in the load's own type."""
    if config.get("quantization") or config.get("quantization_config"):
        return sum(file.stat().st_size for file in weight_files(folder))
    tied = bool(text.get("tie_word_embeddings"))
    total = 0.0
    for name, shape in folder_shapes(folder).items():
        if tied and name == "lm_head.weight":
            continue
        linear = len(shape) == 2 and "embed" not in name and name != "lm_head.weight"
        each = _ON_LOAD.get(quantize or "", width) if linear else width
        total += math.prod(shape) * each
    return int(total)


def _fused(folder: Path, width: float) -> int:
    """Bytes that torch on a CPU holds twice: projections joined into one matrix, beside the mapped
    file that the other weights are read from. Only where the file has the type that is loaded."""
    shapes = folder_shapes(folder)
    stored = sum(file.stat().st_size for file in weight_files(folder))
    if abs(stored / max(1, sum(map(math.prod, shapes.values()))) - width) > 0.5:
        return 0
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return int(
        width * sum(math.prod(s) for name, s in shapes.items() if name.split(".")[-2] in joined)
    )


def _draft_weights(folder: Path, draft: DraftConfig, backend: str, width: float) -> int:
    """Bytes of the draft; torch keeps the K/V projections of all layers once more in one matrix."""
    elements = sum(math.prod(shape) for shape in folder_shapes(folder).values())
    if backend == "torch":
        elements += draft.layers * 2 * draft.kv_heads * draft.head_dim * draft.hidden_size
    return int(elements * width)


def _recurrent_state(text: Mapping[str, Any]) -> int:
    """Bytes of one gated-delta layer's state in fp32."""
    heads = int(text.get("linear_num_value_heads") or 0)
    key, value = (int(text.get(f"linear_{k}_head_dim") or 0) for k in ("key", "value"))
    return heads * key * value * 4


def _width(dtype: str | None, found: Room) -> float:
    """Bytes per number of the type that the backend will choose."""
    if dtype is not None:
        return _BYTES.get(dtype, 2.0)
    return 4.0 if found.kind == "cpu" and not found.native_bf16 else 2.0
