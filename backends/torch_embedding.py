"""The rows of an input embedding, as they are or in 8 bits."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from .torch_linear import tensor_bytes

_AT_ONCE = 4096
"""Rows that are rounded at a time, so that no second matrix is there in fp32."""


def embedding_bits(asked: int | None, device: torch.device, *, quantised: bool) -> int:
    """8 on CUDA beside a quantised body, where memory is what is short; else 16."""
    if asked is not None:
        return asked
    return 8 if quantised and device.type == "cuda" else 16


class Embedding(Protocol):
    """Rows ``[n, hidden]`` for ids ``[n]``."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows."""
        ...

    @property
    def bytes(self) -> int:
        """Size of the matrix."""
        ...


class DenseEmbedding:
    """A matrix as it is; its rows come in ``dtype``, the matrix' own where None."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self.weight = weight
        self._dtype = dtype or weight.dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows."""
        return F.embedding(ids, self.weight).to(self._dtype)

    @property
    def bytes(self) -> int:
        """Size of the matrix."""
        return tensor_bytes(self.weight)


class Int8Embedding:
    """Eight bits per number and a scale per row."""

    def __init__(self, weight: torch.Tensor) -> None:
        largest = weight.abs().amax(dim=-1, keepdim=True).float().clamp_(min=1e-6)
        self._scales = (largest / 127.0).to(weight.dtype)
        self._steps = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        for start in range(0, weight.shape[0], _AT_ONCE):
            rows = slice(start, start + _AT_ONCE)
            steps = (weight[rows].float() / self._scales[rows].float()).round_()
            self._steps[rows] = steps.clamp_(-127, 127).to(torch.int8)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows, spelled out."""
        return self._steps[ids] * self._scales[ids]

    @property
    def bytes(self) -> int:
        """Numbers and scales."""
        return tensor_bytes(self._steps, self._scales)
