"""Transcript: the messages, following the end until the user scrolls."""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from .visible import visible

NEAR = 2
"""Rows from the end within which scrolling down counts as being there."""


class UserMessage(Static, can_focus=True):
    """What the user sent."""

    DEFAULT_CSS = """
    UserMessage {
        height: auto; margin: 0 0 1 0; padding: 0 1;
        border-left: outer $accent; background: $boost;
    }
    UserMessage:focus { border-left: outer $primary; }
    UserMessage.queued { color: $text-muted; border-left: outer $panel; }
    """

    def __init__(self, text: str, *, queued: bool = False) -> None:
        super().__init__(Content(visible(text)), classes="queued" if queued else None)
        self.text = text


class Note(Static):
    """A line of ours between the messages."""

    DEFAULT_CSS = "Note { height: auto; margin: 0 0 1 0; padding: 0 2; color: $text-muted; }"

    def __init__(self, text: str, *, classes: str | None = None) -> None:
        super().__init__(Content(visible(text)), classes=classes)


class Transcript(VerticalScroll):
    """Holds the messages; ``following`` tells whether the end is kept in view."""

    DEFAULT_CSS = "Transcript { height: 1fr; padding: 1 1 0 1; scrollbar-gutter: stable; }"

    class Following(Message):
        """Whether the end is followed has changed."""

        def __init__(self, following: bool) -> None:
            super().__init__()
            self.following = following

    def __init__(self) -> None:
        super().__init__(can_focus=False)
        self.following = True

    def on_mount(self) -> None:
        """Start at the end."""
        self.anchor()

    async def add(self, *widgets: Widget) -> None:
        """Put messages at the end."""
        await self.mount(*widgets)

    def follow(self) -> None:
        """Go to the end and stay there."""
        self.anchor()
        self._set(True)

    def release_anchor(self) -> None:
        """The user scrolled: stay here."""
        super().release_anchor()
        self._set(False)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Reaching the end by any way follows it again; the anchor alone misses some ways."""
        super().watch_scroll_y(old_value, new_value)
        down = new_value > old_value
        if not self.following and down and new_value >= self.max_scroll_y - NEAR:
            self.follow()

    def page(self, direction: int) -> None:
        """One page up (-1) or down (1); down from the end follows it."""
        if direction < 0:
            self.scroll_page_up(animate=False)
        else:
            self.scroll_page_down(animate=False)
            self.call_after_refresh(self._check_end)

    def line(self, direction: int) -> None:
        """One line up or down."""
        if direction < 0:
            self.scroll_up(animate=False)
        else:
            self.scroll_down(animate=False)
            self.call_after_refresh(self._check_end)

    def on_mouse_scroll_down(self) -> None:
        """The wheel at the end follows it."""
        self.call_after_refresh(self._check_end)

    def _check_end(self) -> None:
        if self.scroll_y >= self.max_scroll_y - NEAR:
            self.follow()

    def _set(self, following: bool) -> None:
        if following is not self.following:
            self.following = following
            self.post_message(self.Following(following))
