"""Bytes of a pair's weights once loaded, from file headers: types, quantisation, second copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_local.demo import SOURCE_NAME
from dflash_local.draft_config import DraftConfig
from dflash_local.free_memory import Room
from dflash_local.target_shape import is_lean, is_tied
from dflash_local.weights import Shapes, folder_shapes, weight_files

_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
_BITS = {"nf4": 4, "int8": 8, "4bit": 4, "8bit": 8}
_NAMES = {4: "nf4", 8: "int8", 16: "none"}
HALF_BLOCK = 512
"""Columns of a block of packed fp16 weights; the last one is as long as the others."""
_JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Projections that the backends join into one matrix."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How a backend stores weights: what ``load`` was asked, with the backend's own choices."""

    backend: str
    device: str
    width: float
    """Bytes of a weight that is not quantised."""
    states: float
    """Bytes of a number that is computed: activations, K/V, norms."""
    scheme: str | None
    """Of the target's products; None leaves them."""
    head_scheme: str | None
    draft_scheme: str | None
    packs: bool
    """Whether the CPU's kernels want every product in an order of their own, which is a copy."""
    halves: bool
    """Whether that order is the one of fp16 weights, whose sums are in fp32."""
    light: bool
    """Whether a CPU's draft has its products in 8 bits, in blocks of columns as well."""
    blocks: bool
    """Whether MLX takes the demo's 4-bit blocks as they are."""

    def weights(self, shape: tuple[int, ...], scheme: str | None) -> int:
        """Weights of a product that memory is taken for: fp16 ones lie in blocks of columns."""
        if not self.halves or scheme is not None or len(shape) != 2:
            return math.prod(shape)
        return in_blocks(shape)

    def bytes_of(self, scheme: str | None) -> float:
        """Bytes per weight, scales included."""
        if scheme is None:
            return self.width
        bits = _BITS[scheme]
        if self.backend == "mlx":  # a scale and an offset for 64 weights
            return bits / 8 + 2 * self.width / 64
        return 0.5625 if bits == 4 else 1.02


def storage(
    backend: str,
    room: Room,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    draft_bits: int | None = None,
    head_bits: int | None = None,
) -> Storage:
    """How weights would be stored here; arguments as for ``load``."""
    asked = quantize or ("nf4" if _quantises(backend, room) else "none")
    scheme = asked if asked in _BITS else None
    numbers = dtype if dtype in _BYTES else "bf16" if backend == "mlx" else room.numbers
    # Without kernels of its own for them, torch multiplies bf16 weights as fp16.
    halved = ("fp16",) if "bf16" in room.packs else ("fp16", "bf16")
    halves = backend == "torch" and room.halves and numbers in halved
    width = _BYTES[numbers]
    blocks = backend == "mlx" and (
        quantize == "4bit" or (quantize is None and dtype is None and room.kind == "metal")
    )
    if backend == "mlx":
        head, draft = scheme, {4: "4bit", 8: "8bit"}.get(draft_bits or 0)
    else:
        head, draft = (_of_bits(bits, scheme) for bits in (head_bits, draft_bits))
    return Storage(
        backend,
        room.kind,
        width,
        states=4.0 if halves and numbers == "fp16" else width,
        scheme=scheme,
        head_scheme=head,
        draft_scheme=draft,
        packs=backend == "torch" and (halves or numbers in room.packs),
        halves=halves,
        light=backend == "torch"
        and room.halves
        and numbers != "fp32"
        and asked == "none"
        and draft_bits is None,
        blocks=blocks,
    )


def target_bytes(folder: Path, config: Mapping[str, Any], kept: Storage) -> int:
    """The target: as stored when it is quantised already, else in the load's own type."""
    stored = sum(file.stat().st_size for file in weight_files(folder))
    if config.get("quantization") or config.get("quantization_config"):
        return stored
    if kept.blocks and (folder / SOURCE_NAME).is_file():
        return (folder / SOURCE_NAME).stat().st_size
    shapes = folder_shapes(folder)
    tied, lean = is_tied(config), is_lean(config)
    total = 0.0
    embedding = 0
    for name, shape in shapes.items():
        scheme = kept.scheme if len(shape) > 1 else None
        count, rate = kept.weights(shape, scheme), kept.bytes_of(scheme)
        if "embed_tokens" in name:
            embedding = kept.weights(shape, kept.head_scheme)
            if kept.backend != "mlx":
                count, rate = math.prod(shape), kept.width if lean else kept.states
        elif name == "lm_head.weight":
            count = 0 if tied else kept.weights(shape, kept.head_scheme)
            rate = kept.bytes_of(kept.head_scheme)
        elif len(shape) < 2 or (scheme is None and ".experts." in name):
            count, rate = math.prod(shape), kept.states
        total += count * rate
    if tied and kept.backend == "torch" and (kept.head_scheme or kept.packs):
        total += embedding * kept.bytes_of(kept.head_scheme)  # beside the rows that are looked up
    return int(total)


def draft_bytes(folder: Path, config: DraftConfig, kept: Storage) -> int:
    """The draft; the K/V projections of all layers are there once more in one matrix, and so are
    the rows of the target's head that a reduced vocabulary reads."""
    scheme, shapes = kept.draft_scheme, folder_shapes(folder)
    again = [(config.layers * 2 * config.kv_heads * config.head_dim, config.hidden_size)]
    if "d2t" in shapes and "lm_head.weight" not in shapes:  # rows of the target's head
        again.append((shapes["d2t"][0], config.hidden_size))
    total = 0.0
    for name, shape in (*shapes.items(), *(("again", shape) for shape in again)):
        if not (name in ("again", "lm_head.weight", "fc.weight") or name.endswith("_proj.weight")):
            total += math.prod(shape) * kept.states  # rows of an embedding, norms, version 2's
        elif kept.light and name != "fc.weight":
            total += in_blocks(shape)
        else:
            total += kept.weights(shape, scheme) * kept.bytes_of(scheme)
    return int(total)


def in_blocks(shape: tuple[int, ...]) -> int:
    """Weights of a product as the kernels of packed fp16 and 8 bits keep them."""
    return shape[0] * -(-shape[1] // HALF_BLOCK) * HALF_BLOCK


def loading_bytes(target: Path, config: Mapping[str, Any], kept: Storage, weights: int) -> int:
    """What loading the target holds beyond the ``weights`` it leaves: on a CPU, a family that
    transformers loads is there in the type of its states before products are stored in another."""
    if kept.backend != "torch" or kept.device != "cpu" or is_lean(config):
        return 0
    return max(0, int(_count(folder_shapes(target)) * kept.states) - weights)


def draft_loading_bytes(folder: Path, kept: Storage) -> int:
    """What MLX holds besides while a draft loads: parts until they are joined, files until cast."""
    if kept.backend != "mlx":
        return 0
    shapes = folder_shapes(folder)
    stored = sum(file.stat().st_size for file in weight_files(folder))
    cast = stored if abs(stored / _count(shapes) - kept.width) > 0.5 else 0
    return int(_joined(shapes) * kept.width) + cast


def _joined(shapes: Shapes) -> int:
    """Weights of the projections that are joined."""
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if any(f".{part}." in name for part in _JOINED)
    )


def _count(shapes: Shapes) -> int:
    return max(1, sum(map(math.prod, shapes.values())))


def _of_bits(bits: int | None, scheme: str | None) -> str | None:
    """The scheme that a number of bits means on torch; without one, the target's."""
    name = scheme if bits is None else _NAMES.get(bits)
    return None if name == "none" else name


def _quantises(backend: str, room: Room) -> bool:
    """Whether the torch backend takes 4 bits without being asked."""
    return backend == "torch" and room.kind == "cuda" and find_spec("bitsandbytes") is not None
