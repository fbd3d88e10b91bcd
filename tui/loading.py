"""LoadingCard: how far the load is, in the transcript, so the user can write meanwhile."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import ProgressBar, Static

from dflash_local.events import LoadProgress

from .visible import visible

LOADED = "ready"
"""The stage that a backend ends with; the pair is measured after it, so nobody is told it."""


class LoadingCard(Vertical):
    """A line of text and a bar."""

    DEFAULT_CSS = """
    LoadingCard { height: auto; margin: 0 0 1 0; padding: 0 2; }
    LoadingCard > Static { color: $text-muted; height: auto; }
    """

    def __init__(self, pair: str) -> None:
        super().__init__()
        self._pair = pair
        self._words = Static(Content(visible(f"Loading {pair}; you can write already.")))
        self._bar = ProgressBar(total=None, show_eta=False)

    def compose(self) -> ComposeResult:
        """Words above the bar."""
        yield self._words
        yield self._bar

    def show(self, progress: LoadProgress) -> None:
        """Draw the latest step."""
        self._words.update(
            Content(visible(f"Loading {self._pair}: {progress.stage}. You can write already."))
        )
        self._bar.update(total=progress.total or None, progress=progress.done)
