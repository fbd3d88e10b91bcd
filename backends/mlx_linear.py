"""A linear layer: plain or quantised weights, and the one product over them.

A kernel for few rows on quantised weights belongs here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

GROUP = 64


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T + bias``; ``scales`` is set where the weight is packed."""

    weight: mx.array
    bias: mx.array | None = None
    scales: mx.array | None = None
    offsets: mx.array | None = None
    bits: int = 0

    def __call__(self, x: mx.array) -> mx.array:
        """Rows ``[..., inputs]`` to ``[..., outputs]``."""
        if self.scales is not None:
            out = mx.quantized_matmul(
                x, self.weight, self.scales, self.offsets, group_size=GROUP, bits=self.bits
            )
            return out if self.bias is None else out + self.bias
        if self.bias is None:
            return x @ self.weight.T
        return mx.addmm(self.bias, x, self.weight.T)

    def arrays(self) -> list[mx.array]:
        """Everything held."""
        return [a for a in (self.weight, self.bias, self.scales, self.offsets) if a is not None]


def linear(
    weights: Sequence[mx.array], biases: Sequence[mx.array] = (), bits: int | None = None
) -> Linear:
    """One layer that stacks the outputs of several, packed to ``bits`` where given.

    Inputs that the group size does not divide stay unpacked.
    """
    weight = weights[0] if len(weights) == 1 else mx.concatenate(list(weights))
    bias = mx.concatenate(list(biases)) if biases else None
    if bits is None or weight.shape[-1] % GROUP:
        return Linear(weight, bias)
    packed, scales, offsets = mx.quantize(weight, group_size=GROUP, bits=bits)
    return Linear(packed, bias, scales, offsets, bits)
