"""Checkpoints that bitsandbytes has quantised to 4 bits already: packed weights and their scales.

Projections that read the same input are merged without unpacking: scale blocks lie inside rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_local.errors import BackendUnavailable, WeightsError

from .torch_bnb import bitsandbytes
from .torch_weights import TensorReader

BLOCK = 64
"""Weights that share a scale."""

_STATE = "quant_state.bitsandbytes__nf4"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", _STATE)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[outputs, columns]`` in NF4, two numbers a byte."""

    packed: torch.Tensor
    """Bytes ``[outputs * columns / 2, 1]``."""
    absmax: torch.Tensor
    """A scale per block in fp32, row by row."""
    code: torch.Tensor
    """The 16 numbers that four bits stand for."""
    shape: tuple[int, int]

    @property
    def state(self) -> Any:
        """The same for bitsandbytes."""
        bnb = bitsandbytes()
        return bnb.functional.QuantState(
            absmax=self.absmax,
            shape=torch.Size(self.shape),
            code=self.code,
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=torch.bfloat16,
        )

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight spelled out."""
        bnb = bitsandbytes()
        weight: torch.Tensor = bnb.functional.dequantize_4bit(self.packed, self.state)
        return weight.to(dtype)


def is_prequantised(config: Mapping[str, Any], folder: object) -> bool:
    """Whether a ``config.json`` describes NF4 weights of bitsandbytes.

    Raises:
        BackendUnavailable: its weights are quantised in a way that is not read here.
    """
    stored = config.get("quantization_config")
    if stored is None and isinstance(config.get("quantization"), Mapping):
        stored = {"quant_method": "mlx"}
    if stored is None:
        return False
    if not isinstance(stored, Mapping):
        raise WeightsError(f"{folder}: quantization_config is {stored!r}.", "Pull the model again.")
    method = str(stored.get("quant_method", "bitsandbytes"))
    kind = "int8" if stored.get("load_in_8bit") else stored.get("bnb_4bit_quant_type", "fp4")
    if method == "bitsandbytes" and kind == "nf4":
        return True
    found = f"{method} {kind}" if method == "bitsandbytes" else method
    raise BackendUnavailable(
        f"{folder} holds weights quantised by {found}, which the torch backend does not read.",
        "Choose the 16-bit repository, which is quantised while loading, or one in bitsandbytes "
        "NF4.",
    )


def read_packed(reader: TensorReader, name: str, shape: tuple[int, int]) -> PackedWeight | None:
    """The packed weight called ``name``; None where it is stored as it is.

    Raises:
        WeightsError: it has another shape, another block size, or a part is damaged.
    """
    if f"{name}.{_STATE}" not in reader:
        return None
    bnb = bitsandbytes()
    parts = {part: reader.raw(f"{name}.{part}") for part in _PARTS if f"{name}.{part}" in reader}
    packed = reader.raw(name)
    try:
        state: Any = bnb.functional.QuantState.from_dict(parts, packed.device)
        absmax = state.absmax
        if state.nested:
            absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    except (AssertionError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise WeightsError(f"{name} has a damaged scale: {error}.", "Pull again.") from error
    rows, columns = shape
    if tuple(state.shape) != shape or state.blocksize != BLOCK or columns % BLOCK:
        raise WeightsError(
            f"{name} holds {list(state.shape)} in blocks of {state.blocksize}, wanted are "
            f"{list(shape)} in blocks of {BLOCK}.",
            "Choose the 16-bit repository, which is quantised while loading.",
        )
    if packed.numel() * 2 != rows * columns or absmax.numel() * BLOCK != rows * columns:
        raise WeightsError(f"{name} is not as long as its shape says.", "Pull again.")
    return PackedWeight(packed.view(-1, 1), absmax.float(), state.code.float(), shape)


def joined(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Weights that read the same input as one."""
    if len(weights) == 1:
        return weights[0]
    return PackedWeight(
        torch.cat([w.packed for w in weights]),
        torch.cat([w.absmax for w in weights]),
        weights[0].code,
        (sum(w.shape[0] for w in weights), weights[0].shape[1]),
    )
