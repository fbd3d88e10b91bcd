"""Rotary embedding of a draft: the angle of every pair of channels per position."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: plain, or YaRN where ``yarn_factor`` is set."""

    theta: float
    yarn_factor: float | None = None
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosine and sine at every position."""

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """``head_dim // 2`` angles per position, YaRN's blend where it is set."""
        half = head_dim // 2
        plain = [self.theta ** (-2.0 * i / head_dim) for i in range(half)]
        if self.yarn_factor is None:
            return tuple(plain)

        def dim(rotations: float) -> float:
            turns = self.original_positions / (2.0 * math.pi * rotations)
            return head_dim * math.log(turns) / (2.0 * math.log(self.theta))

        low = max(math.floor(dim(self.beta_fast)), 0)
        high: float = min(math.ceil(dim(self.beta_slow)), head_dim - 1)
        if low == high:
            high += 0.001
        ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(half)]
        return tuple(
            f / self.yarn_factor * r + f * (1.0 - r) for f, r in zip(plain, ramp, strict=True)
        )
