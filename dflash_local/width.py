"""How many ids to draft next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dflash_local.stats import RoundFigures


class Width(Protocol):
    """Chooses the drafted count of each round; the loop clips it to what fits."""

    def next(self, position: int) -> int:
        """Ids to draft at this context depth; 0 is a plain step."""
        ...

    def observe(self, round_: RoundFigures) -> None:
        """Learn from a finished round."""
        ...


@dataclass(frozen=True, slots=True)
class FixedWidth:
    """Always the same count; 0 is plain decoding."""

    count: int

    def next(self, position: int) -> int:
        """The count, at any depth."""
        return self.count

    def observe(self, round_: RoundFigures) -> None:
        """Nothing to learn."""
