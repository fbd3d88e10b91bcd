"""Completions: the slash commands that begin as what is typed, above the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Static

from .actions import Action
from .commands import REGISTRY

MOST = 8


class Completions(Static):
    """Hidden while nothing can be completed; the arrows pick a line."""

    DEFAULT_CSS = """
    Completions {
        display: none; height: auto; max-height: 10; padding: 0 2; background: $panel;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    Completions.shown { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._actions: Sequence[Action] = ()
        self._at: int | None = None
        """The line that is picked; None until an arrow is pressed."""

    @property
    def picked(self) -> Action | None:
        """The command that an arrow went to."""
        if self._at is None or not self.has_class("shown"):
            return None
        return self._actions[self._at]

    def show(self, typed: str) -> None:
        """Offer what ``typed`` may become."""
        self._actions, self._at = REGISTRY.complete(typed), None
        self.set_class(bool(self._actions), "shown")
        self._draw()

    def move(self, direction: int) -> bool:
        """Pick the line before (-1) or after (1); False where nothing is shown."""
        if not self.has_class("shown"):
            return False
        start = -1 if direction > 0 else 0
        self._at = ((start if self._at is None else self._at) + direction) % len(self._actions)
        self._draw()
        return True

    def hide(self) -> bool:
        """Close it; whether it was open."""
        was_open = self.has_class("shown")
        self.remove_class("shown")
        return was_open

    def _draw(self) -> None:
        at = 0 if self._at is None else self._at
        first = max(0, min(at - MOST // 2, len(self._actions) - MOST))
        shown = self._actions[first : first + MOST]
        lines = [
            (f"{action.usage:<22} {action.title}\n", "reverse" if action is self.picked else "")
            for action in shown
        ]
        more = f" · {len(self._actions) - MOST} more" if len(self._actions) > MOST else ""
        self.update(Content.assemble(*lines, f"Up and Down pick · Tab completes{more}"))
