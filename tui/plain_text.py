"""PlainText: a growing text shown as it is, in pieces small enough to lay out quickly."""

from __future__ import annotations

import asyncio

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
        self._early: str | None = text
        """What came before there was a place for it; None from then on."""
        self._lock = asyncio.Lock()
        """Text may come from the answer and from the key that opens the view, at the same time."""

    async def on_mount(self) -> None:
        """Show what came before."""
        early, self._early = self._early or "", None
        await self.append(early)

    async def append(self, text: str) -> None:
        """Add text at the end."""
        if self._early is not None:
            self._early += text
            return
        self.text += text
        async with self._lock:
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
            piece = Static(Content(text), classes="piece open")
            await self.mount(piece)
        if new:
            piece.remove_class("open")


def _cut(text: str) -> int:
    """Where a full piece ends: after its last line break, or anywhere in one huge line."""
    if len(text) <= PIECE:
        return 0
    return text.rfind("\n", 0, PIECE) + 1 or PIECE
