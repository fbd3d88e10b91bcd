"""PlainText: a growing text shown as it is, in pieces small enough to lay out quickly."""

from __future__ import annotations

from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

PIECE = 2000
"""Characters per widget: adding text lays out the last piece only."""


class PlainText(Vertical):
    """Literal text; ``append`` adds to it."""

    DEFAULT_CSS = """
    PlainText { height: auto; padding: 0 2; }
    PlainText > Static { height: auto; }
    """

    def __init__(self, text: str = "", *, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self.text = ""
        self._last = ""
        self._initial = text

    async def on_mount(self) -> None:
        """Show the text given at the start."""
        initial, self._initial = self._initial, ""
        await self.append(initial)

    async def append(self, text: str) -> None:
        """Add text at the end."""
        if not self.is_mounted:
            self._initial += text
            return
        self.text += text
        self._last += text
        cut = _cut(self._last)
        while cut:
            await self._show(self._last[:cut].removesuffix("\n"), new=True)
            self._last = self._last[cut:]
            cut = _cut(self._last)
        if self._last:
            await self._show(self._last.removesuffix("\n"), new=False)

    async def _show(self, text: str, *, new: bool) -> None:
        """Fill the last widget; ``new`` completes it, so the next text gets another."""
        open_pieces = self.query(".open")
        if open_pieces:
            piece = open_pieces.last(Static)
            piece.update(Content(text))
        else:
            piece = Static(Content(text), classes="open")
            await self.mount(piece)
        if new:
            piece.remove_class("open")


def _cut(text: str) -> int:
    """Where a full piece ends: after its last line break, or anywhere in one huge line."""
    if len(text) <= PIECE:
        return 0
    return text.rfind("\n", 0, PIECE) + 1 or PIECE
