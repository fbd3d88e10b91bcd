"""TintView: a reply's text coloured and shaped by where each token came from."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from dflash_local.events import Origin
from dflash_local.trace import Trace

from .visible import visible

LIVE_PIECES = 600
"""Pieces that are drawn while the reply still grows."""

STYLES: dict[Origin, str] = {
    "draft": "on $primary 25%",
    "correction": "underline",
    "bonus": "bold",
    "first": "dim",
    "plain": "dim",
}


class Legend(Static):
    """What the shapes mean, on one line for all replies; shown while they are tinted."""

    DEFAULT_CSS = """
    Legend { height: 1; padding: 0 1; display: none; }
    Legend.shown { display: block; }
    """

    def __init__(self) -> None:
        words = ("draft accepted", "correction", "bonus", "plain")
        styled = zip(words, STYLES.values(), strict=False)
        line = [part for pair in styled for part in (pair, "  ")]
        super().__init__(Content.assemble(*line, "Alt+Left round"))


class TintView(Static):
    """Draws the texts of one reply; ``step`` looks at a single round."""

    DEFAULT_CSS = "TintView { height: auto; padding: 0 2; }"

    def __init__(self) -> None:
        super().__init__()
        self._round = 0
        """The round looked at; 0 is none."""

    def draw(self, trace: Trace, *, live: bool) -> None:
        """Show a reply's text, the latest only while more comes."""
        pieces = [
            (text, origin, number)
            for number, round_ in enumerate(trace.rounds)
            for origin, text in round_.pieces
        ]
        shown = pieces[-LIVE_PIECES:] if live else pieces
        parts: list[tuple[str, str]] = [("…", "dim")] if len(shown) < len(pieces) else []
        for text, origin, number in shown:
            looked_at = " reverse" if number == self._round and number else ""
            parts.append((visible(text), STYLES[origin] + looked_at))
        lines = [Content.assemble(*parts)]
        if self._round:
            lines.append(Content(_told(trace, self._round)))
        self.update(Content("\n").join(lines))

    def step(self, direction: int, trace: Trace) -> None:
        """Look at the round before or after."""
        last = len(trace.rounds) - 1
        self._round = (self._round or (last + 1 if direction < 0 else 0)) + direction
        self._round = min(max(self._round, 0), max(last, 0))


def _told(trace: Trace, number: int) -> str:
    if number >= len(trace.rounds) or not trace.rounds[number].emitted:
        return f"round {number}: a first token, or not kept"
    found = trace.rounds[number]
    return (
        f"round {number}: {found.drafted} drafted, {found.accepted} accepted, "
        f"{found.emitted} emitted"
    )
