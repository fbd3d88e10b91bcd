"""The status line: speed, gain, acceptance, ribbon, context, memory, pair; by the room there is."""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content
from textual.widgets import Static

from . import figures
from .ribbon import Cell, ribbon
from .visible import visible

RIBBON = (11, 40)
"""Least and most cells of the ribbon."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the line tells; what is not known yet is None and takes no room."""

    state: str = ""
    """A word in front while there is no speed to show."""
    tok_s: float | None = None
    ratio: float | None = None
    estimated: bool = True
    tau: float | None = None
    draft_rate: float | None = None
    parked: bool = False
    """Drafting rests; the rates are of the rounds before."""
    cells: tuple[Cell, ...] = ()
    block: int = 1
    position: int = 0
    context: int = 0
    memory: int = 0
    pair: str = ""


def status(values: Status, width: int, *, ascii_only: bool = False) -> Content:
    """The line in ``width`` columns: the first four figures always, then what fits."""
    tau = "tau" if ascii_only else "τ"
    times = "x" if ascii_only else "×"
    head: list[str] = []
    if values.state:
        head.append(visible(values.state))
    if values.tok_s is not None:
        head.append(figures.speed(values.tok_s))
    if values.ratio is not None:
        mark = " est." if values.estimated else ""
        head.append(f"{values.ratio:.1f}{times}{mark}")
    if values.parked:
        words = "  ".join([*head, figures.PARKED])
        head.append(figures.PARKED if len(words) <= width else figures.PARKED.partition(":")[0])
    elif values.tau is not None:
        head.append(f"{tau} {values.tau:.1f}")
    if values.draft_rate is not None and not values.parked:
        head.append(f"{100 * values.draft_rate:.0f}%")
    tail: list[str] = []
    if values.context:
        tail.append(f"ctx {figures.count(values.position)}/{figures.count(values.context)}")
    if values.memory:
        tail.append(figures.gigabytes(values.memory))
    if values.pair:
        tail.append(visible(values.pair))
    left = "  ".join(head)
    room = width - len(left) - 2
    cells = min(len(values.cells), RIBBON[1])
    least = min(cells, RIBBON[0])
    while tail and len("  ".join(tail)) + (least + 2 if cells else 0) > room:
        tail.pop()
    right = "  ".join(tail)
    cells = min(cells, room - (len(right) + 2 if right else 0))
    parts: list[Content | str] = [left]
    if cells >= min(least, 4) and cells > 0:
        parts.append(ribbon(values.cells, values.block, cells, ascii_only=ascii_only))
    parts.append(right)
    return Content("  ").join(
        part if isinstance(part, Content) else Content(part) for part in parts if part
    )


class StatusLine(Static):
    """Shows a ``Status``."""

    DEFAULT_CSS = """
    StatusLine { height: 1; padding: 0 1; background: $panel; color: $text; }
    """

    def __init__(self, *, ascii_only: bool = False) -> None:
        super().__init__()
        self._ascii = ascii_only
        self.values = Status()

    def show(self, values: Status) -> None:
        """Draw the line anew."""
        self.values = values
        self.refresh()

    def render(self) -> Content:
        """Fitted to the width at hand."""
        return status(self.values, self.content_size.width, ascii_only=self._ascii)
