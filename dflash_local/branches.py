"""How a draft branched: what the loop's figures need of its tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Branches:
    """A drafted tree, seen from the path that was accepted."""

    depth: int
    """Slots of the draft that it grew from: most ids that could have been accepted."""
    ranks: tuple[int, ...]
    """Which of the drafted ids were accepted, counted from 1 in the draft's own order of
    likelihood. A narrower tree is the front of a wider one, so these tell what it would have
    yielded."""


def in_place(rows: Sequence[int]) -> int:
    """How many of a tree's rows, in the order that they are to have, lie so already."""
    return next((at for at, row in enumerate(rows) if at != row), len(rows))
