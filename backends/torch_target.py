"""The target's seam: what the backend asks of a target, however its forward is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .torch_cache import TargetCache
from .torch_tree import Tree


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The numbers of one layer that caches and masks depend on."""

    kind: str
    """``full_attention``, ``sliding_attention`` or ``linear_attention``, as transformers says."""
    window: int | None
    """Rows that a query sees, itself included; None is all."""
    heads: int
    kv_heads: int
    head_dim: int
    stored: bool = True
    """Whether the layer keeps K/V of its own; others are recurrent, or read another layer's."""

    @property
    def groups(self) -> int:
        """Query heads per K/V head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The numbers of a target that caches and drafts depend on."""

    hidden_size: int
    layers: tuple[LayerShape, ...]
    vocab_size: int
    embedding_rows: int


class Target(Protocol):
    """Runs rows of ids, keeps their tapped states and the K/V behind them."""

    @property
    def shape(self) -> TargetShape:
        """Its numbers."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What its states are made of."""
        ...

    @property
    def cache(self) -> TargetCache:
        """What it remembers of the rows before."""
        ...

    def forward(self, ids: torch.Tensor, tree: Tree | None = None) -> torch.Tensor:
        """Final states ``[rows, hidden]`` of ids that follow the cache, or of a tree's.

        The rows count only after ``cache.advance``.
        """
        ...

    def features(self) -> torch.Tensor:
        """Tapped states of the last forward, ``[rows, taps * hidden]``; may be asked once."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The output head on final states, ``[rows, vocab]``."""
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The input embedding as the target's own layers see it, ``[rows, hidden]``."""
        ...

    def bytes(self) -> int:
        """Size of the weights."""
        ...

    def close(self) -> None:
        """Let go of hooks and weights."""
        ...
