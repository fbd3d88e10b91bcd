"""Products with a weight, however it is stored."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """``x @ weight.T + bias`` for states ``[rows, columns]``."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product, ``[rows, outputs]``."""
        ...

    @property
    def bytes(self) -> int:
        """Size of the weight, its scales and its bias."""
        ...


class LinearMaker(Protocol):
    """Turns a weight into a product; decides how it is stored."""

    def __call__(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """``weight`` is ``[outputs, columns]``; ``name`` is for reports."""
        ...


class DenseLinear:
    """A weight as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product."""
        return F.linear(states, self.weight, self.bias)

    @property
    def bytes(self) -> int:
        """Size of weight and bias."""
        return tensor_bytes(self.weight, self.bias)


def dense(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The maker that stores weights as they are."""
    return DenseLinear(weight, bias)


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Size of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
