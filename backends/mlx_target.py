"""What the backend asks of a target, however its model is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from .mlx_history import History
from .mlx_tree import Tree


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward: states of the given rows, not yet counted in the caches."""

    hidden: mx.array
    """What ``logits`` reads, one row per id."""
    features: mx.array | None
    """Tapped states joined, ``[rows, taps * hidden]``; None without taps."""


class Target(Protocol):
    """A target over its caches."""

    @property
    def history(self) -> History:
        """The caches and their position."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the activations."""
        ...

    @property
    def bytes(self) -> int:
        """Size of the weights."""
        ...

    @property
    def branching(self) -> bool:
        """Whether the rows of a forward may be a tree's."""
        ...

    def forward(self, ids: mx.array, *, revocable: bool = False, tree: Tree | None = None) -> Pass:
        """Run ids ``[rows]``, a tree's or one behind the other, behind the caches.

        The rows count only after ``history.commit`` or ``history.advance``; to commit fewer than
        all of them they must be ``revocable``.
        """
        ...

    def gather(self, rows: Sequence[int]) -> None:
        """Bring these rows of the last tree to the front of what it wrote."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """The target's scores ``[rows, vocab]`` for rows of ``Pass.hidden``."""
        ...
