"""All caches of a target together: one position, and the saved states to go back to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .mlx_cache import FullCache, LayerCache
from .mlx_host import submit

MARKS = 4
"""Saved states kept at most; the oldest goes first."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A position and, per layer, what it takes to come back to it."""

    position: int
    saved: tuple[Any, ...]


class History:
    """The caches of every layer, moved in step.

    Args:
        make: empty caches, one per layer that has one.
    """

    def __init__(self, make: Callable[[], Sequence[LayerCache]]) -> None:
        self._make = make
        self._marks: list[_Mark] = []
        self._marked = False
        """Whether the running prefill has its mark already."""
        self.layers: Sequence[LayerCache] = make()
        self.position = 0

    @property
    def trimmable(self) -> bool:
        """Whether every earlier position can be reached without a saved state."""
        return all(isinstance(layer, FullCache) for layer in self.layers)

    def advance(self, rows: int) -> None:
        """Count rows that a forward has written and nobody will take back."""
        self._commit(self.position + rows)

    def commit(self, length: int) -> None:
        """Keep what a forward has written up to ``length``."""
        self._commit(length)
        self._marked = False

    def mark(self) -> None:
        """Save the state here. One prefill holds one mark, the newest."""
        if self._marked:
            self._marks.pop()
        mark = _Mark(self.position, tuple(layer.save() for layer in self.layers))
        self._marks = [*self._marks, mark][-MARKS:]
        self._marked = True
        submit(mark.saved)

    def rewind(self, position: int) -> int:
        """Go back to at most ``position``: exactly there, to a mark before it, or to 0."""
        position = min(position, self.position)
        self._marks = [mark for mark in self._marks if mark.position <= position]
        self._marked = False
        if position > 0 and all(layer.reaches(position) for layer in self.layers):
            return self._restore(position, (None,) * len(self.layers))
        if self._marks:
            return self._restore(self._marks[-1].position, self._marks[-1].saved)
        return self.reset()

    def reset(self) -> int:
        """Forget everything, also what a failed forward left behind."""
        self._marks.clear()
        self._marked = False
        self.layers, self.position = self._make(), 0
        return 0

    def arrays(self) -> list[mx.array]:
        """Everything the layers hold, to be evaluated."""
        return [a for layer in self.layers for a in layer.arrays()]

    @property
    def bytes(self) -> int:
        """Size of the caches, saved states left out."""
        return sum(a.nbytes for a in self.arrays())

    def _commit(self, length: int) -> None:
        for layer in self.layers:
            layer.commit(length)
        self.position = length

    def _restore(self, position: int, saved: Sequence[Any]) -> int:
        for layer, state in zip(self.layers, saved, strict=True):
            layer.restore(position, state)
        self.position = position
        return position
