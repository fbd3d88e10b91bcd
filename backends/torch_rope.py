"""Rotary embedding from one table: a row of cosines and signed sines per position."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .torch_families import rope_kind


class RopeTable:
    """``[positions, 1, head_dim]`` cosines and sines, the sines of the left half negated.

    With them a rotation is ``x * cos + roll(x, half) * sin``: three operators instead of eight.
    """

    def __init__(
        self,
        frequencies: torch.Tensor,
        factor: float,
        positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        places = torch.arange(positions, dtype=torch.float32, device=device)
        angles = places[:, None] * frequencies.to(device, torch.float32)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.cos = torch.cat((cos, cos), dim=-1).to(dtype)[:, None]
        self.sin = torch.cat((-sin, sin), dim=-1).to(dtype)[:, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[rows, heads, dim]`` by entries ``[rows, 1, dim]`` of a table."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def target_frequencies(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angles per position ``[head_dim / 2]`` and the factor on cosine and sine, from a config of
    transformers."""
    kind = rope_kind(config)
    if kind == "default":
        base = float(config.rope_parameters["rope_theta"])
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return 1.0 / (base**exponents), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config)
    return frequencies, float(factor)
