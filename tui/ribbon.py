"""The acceptance ribbon: one cell per round, newest at the right.

The height is the number of tokens emitted, on the fixed scale 1 to the block size, so a bad
stretch looks bad. The colour, and in ASCII the case, says whether everything drafted was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from textual.content import Content

GLYPHS = "▁▂▃▄▅▆▇█"
ASCII_GLYPHS = "12345678"

Kind = Literal["full", "part", "none", "plain"]
_STYLES: dict[Kind, str] = {
    "full": "$text-success",
    "part": "$text-primary",
    "none": "$text-warning",
    "plain": "$text-muted",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One round."""

    emitted: int
    depth: int
    """Most ids that could have been accepted."""
    accepted: int

    @property
    def kind(self) -> Kind:
        """How much of the draft was taken."""
        if not self.depth:
            return "plain"
        if self.accepted == self.depth:
            return "full"
        return "part" if self.accepted else "none"


def level(emitted: int, block: int) -> int:
    """0 to 7: where ``emitted`` lies between 1 and ``block``."""
    if block <= 1:
        return 0
    share = (min(max(emitted, 1), block) - 1) / (block - 1)
    return round(share * (len(GLYPHS) - 1))


def ribbon(cells: Sequence[Cell], block: int, width: int, *, ascii_only: bool = False) -> Content:
    """The last ``width`` rounds."""
    shown = cells[-width:] if width > 0 else ()
    glyphs = ASCII_GLYPHS if ascii_only else GLYPHS
    return Content.assemble(*_runs(shown, block, glyphs))


def _runs(cells: Iterable[Cell], block: int, glyphs: str) -> list[tuple[str, str]]:
    runs: list[tuple[str, str]] = []
    for cell in cells:
        glyph, style = glyphs[level(cell.emitted, block)], _STYLES[cell.kind]
        if runs and runs[-1][1] == style:
            runs[-1] = (runs[-1][0] + glyph, style)
        else:
            runs.append((glyph, style))
    return runs
