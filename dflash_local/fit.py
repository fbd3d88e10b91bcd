"""Whether a pair fits: bytes of weights, draft, caches and workspace against what is free here.

Reads configs and safetensors headers only; no framework is loaded. The formula counts what the
backends allocate, so it says for a context what the peak will be, and which context is the longest
that still fits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_local import memory_need
from dflash_local.draft_config import read_draft_config
from dflash_local.errors import DflashError, DoesNotFit
from dflash_local.free_memory import Room, room
from dflash_local.memory_need import Need
from dflash_local.pairs import Files, Pair, Shape
from dflash_local.target_shape import limit_of, shape_of
from dflash_local.weight_bytes import (
    Storage,
    draft_bytes,
    draft_loading_bytes,
    loading_bytes,
    storage,
    target_bytes,
)
from dflash_local.weights import read_json

DEFAULT_CONTEXT = 8192

_UNKNOWN_DRAFT = 2**30
_DEMO_WEIGHTS = 134_515_008
_DEMO_HALVED = 493_626_624
"""Its bytes in fp16 on a CPU: 576 columns take the room of 1,024, and the head is there twice."""


_LEAST = 256
"""Positions that a chat needs at least."""


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

    @property
    def useful(self) -> bool:
        """Whether the longest context that fits is worth a load."""
        return self.largest_context >= _LEAST

    def __str__(self) -> str:
        n = self.need
        parts = (
            f"weights {gigabytes(n.weights)} + draft {gigabytes(n.draft)} + K/V for "
            f"{self.context:,} tokens {gigabytes(n.cache + n.draft_cache)} + workspace "
            f"{gigabytes(n.workspace)} = {gigabytes(n.total)}"
        )
        return f"{parts}; {gigabytes(self.room.free)} free on {self.room.device}"


def fit(
    target_dir: Path,
    draft_dir: Path | None,
    *,
    backend: str,
    dtype: str | None = None,
    quantize: str | None = None,
    draft_bits: int | None = None,
    head_bits: int | None = None,
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
        quantize, draft_bits, head_bits: quantisation at load, as for ``load``.
        context: positions; None is the backend's default.
        draft_window, kv_bits: as for ``load``.
        free: the room to hold it against; measured when None.

    Raises:
        WeightsError: files are missing or damaged.
    """
    found = free or room(backend)
    kept = storage(
        backend,
        found,
        dtype=dtype,
        quantize=quantize,
        draft_bits=draft_bits,
        head_bits=head_bits,
    )
    config = read_json(target_dir / "config.json")
    draft = None if draft_dir is None else read_draft_config(draft_dir).limited(draft_window)
    weights = target_bytes(target_dir, config, kept)
    loading = loading_bytes(target_dir, config, kept, weights)
    if draft_dir is not None:
        loading += draft_loading_bytes(draft_dir, kept)
    sizes = memory_need.Sizes(
        shape=shape_of(config),
        weights=weights,
        draft_weights=0
        if draft_dir is None or draft is None
        else draft_bytes(draft_dir, draft, kept),
        backend=backend,
        device=found.kind,
        width=kept.states,
        draft=draft,
        kv_bits=kv_bits or 16,
        loading=loading,
    )
    return _fit(sizes.need, context, limit_of(config), found)


def fit_pair(
    pair: Pair,
    files: Files,
    *,
    backend: str,
    context: int | None = None,
    free: Room | None = None,
) -> Fit | None:
    """The same before anything is downloaded, from the registry's numbers; None where it has none.

    Good to some 10 %: exact sizes come with the files.
    """
    if pair.shape is None:
        return None
    found = free or room(backend)
    kept = storage(backend, found)
    weights = _registered_weights(files, pair.shape, kept)
    if not weights:
        return None
    draft = (pair.draft.approx_bytes or _UNKNOWN_DRAFT) / 2 * kept.bytes_of(kept.draft_scheme)
    sizes = memory_need.Sizes(
        shape=pair.shape,
        weights=weights,
        draft_weights=int(draft),
        backend=backend,
        device=found.kind,
        width=kept.states,
    )
    return _fit(sizes.need, context, pair.context or DEFAULT_CONTEXT, found)


def check(
    target_dir: Path,
    draft_dir: Path | None,
    *,
    backend: str,
    dtype: str | None = None,
    quantize: str | None = None,
    draft_bits: int | None = None,
    head_bits: int | None = None,
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
            draft_bits=draft_bits,
            head_bits=head_bits,
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
    if result.useful:
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


def _fit(need: Callable[[int], Need], asked: int | None, limit: int, found: Room) -> Fit:
    """The need at the context asked for, and the longest context that still fits."""
    context = asked or min(DEFAULT_CONTEXT, limit)
    low, high = 0, max(context, limit)
    if need(1).total > found.free:
        high = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if need(middle).total <= found.free else (low, middle - 1)
    return Fit(need(context), context, found, min(low, limit))


def _registered_weights(files: Files, shape: Shape, kept: Storage) -> int:
    """Bytes of a registered target once loaded: as published, else from its parameters; 0 where
    neither is known."""
    if files.source == "demo":  # kept converted, and loaded in the device's own type
        return _DEMO_HALVED if kept.halves else int(_DEMO_WEIGHTS * kept.width)
    if kept.scheme in files.on_load and shape.parameters:
        return int(shape.parameters * kept.bytes_of(kept.scheme))
    if files.approx_bytes:
        plain = files.weights == "bf16"
        return int(files.approx_bytes / 2 * kept.width) if plain else files.approx_bytes
    ends = 2 * shape.vocab * shape.hidden  # embedding and head, which most leave at 16 bits
    body = max(0, shape.parameters - ends)
    known = {
        "bf16": kept.width * shape.parameters,
        "8bit": 1.0625 * shape.parameters,
        "4bit": 0.5625 * shape.parameters,
        "fp8": body + 2 * ends,
        # Some repositories leave chosen layers at 16 bits as well, and say so in their name.
        "nf4": 0 if "-unsloth-" in files.repo else 0.516 * body + 2 * ends,
    }
    return int(known.get(files.weights, 0)) if shape.parameters else 0
