"""Completions: the slash commands that begin as what is typed, above the prompt."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from .commands import REGISTRY

MOST = 8


class Completions(Static):
    """Hidden while nothing can be completed."""

    DEFAULT_CSS = """
    Completions {
        display: none; height: auto; max-height: 10; padding: 0 2; background: $panel;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    Completions.shown { display: block; }
    """

    def show(self, typed: str) -> None:
        """Offer what ``typed`` may become."""
        actions = REGISTRY.complete(typed)
        self.set_class(bool(actions), "shown")
        lines = [f"{action.usage:<22} {action.title}" for action in actions[:MOST]]
        more = f" · {len(actions) - MOST} more" if len(actions) > MOST else ""
        self.update(Content("\n".join([*lines, f"Tab completes{more}"])))

    def hide(self) -> bool:
        """Close it; whether it was open."""
        was_open = self.has_class("shown")
        self.remove_class("shown")
        return was_open
