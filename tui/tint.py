"""TintView: a reply's text coloured and shaped by where each token came from."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Static

from dflash_local.events import Origin, Round, Text

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
LEGEND = Content.assemble(
    ("draft accepted", STYLES["draft"]),
    "  ",
    ("correction", STYLES["correction"]),
    "  ",
    ("bonus", STYLES["bonus"]),
    "  ",
    ("first or plain", STYLES["plain"]),
    "  Alt+Left/Right: rounds",
)


class TintView(Static):
    """Draws the texts of one reply; ``step`` looks at a single round."""

    DEFAULT_CSS = "TintView { height: auto; padding: 0 2; }"

    def __init__(self) -> None:
        super().__init__()
        self._round = 0
        """The round looked at; 0 is none."""

    def draw(self, texts: Sequence[Text], rounds: Sequence[Round], *, live: bool) -> None:
        """Show the texts, the latest only while more come."""
        shown = texts[-LIVE_PIECES:] if live else texts
        parts: list[tuple[str, str]] = [("…", "dim")] if len(shown) < len(texts) else []
        for text in shown:
            looked_at = " reverse" if text.round == self._round and self._round else ""
            parts += [
                (visible(piece.text), STYLES[piece.origin] + looked_at)
                for piece in text.pieces
                if piece.channel == "answer"
            ]
        lines = [Content.assemble(*parts), LEGEND]
        if self._round:
            lines.append(Content(_told(rounds, self._round)))
        self.update(Content("\n").join(lines))

    def step(self, direction: int, rounds: Sequence[Round]) -> None:
        """Look at the round before or after."""
        last = len(rounds)
        self._round = (self._round or (last + 1 if direction < 0 else 0)) + direction
        self._round = min(max(self._round, 0), last)


def _told(rounds: Sequence[Round], index: int) -> str:
    found = next((round_ for round_ in rounds if round_.index == index), None)
    if found is None:
        return f"round {index}: not kept"
    return (
        f"round {index}: {found.drafted} drafted, {found.accepted} accepted, "
        f"{len(found.tokens)} emitted"
    )
