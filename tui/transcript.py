"""Transcript: the messages, following the end until the user scrolls.

Only the last turns are mounted; earlier ones come when the user scrolls up to them. Layout and
resizing then cost the same in a chat of any length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from dflash_local.chat import Conversation, Turn

from . import figures
from .commands import REGISTRY
from .reply import Reply
from .visible import visible

NEAR = 2
"""Rows from the end within which scrolling down counts as being there."""
WINDOW = 10
"""Turns that are mounted."""
MORE = 5
"""Turns that scrolling up to the top brings."""
LONG = 4000
"""Characters of a user's message that are shown."""


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
    BINDINGS: ClassVar[list[BindingType]] = [*REGISTRY.bindings("message")]

    def __init__(self, turn: int, text: str, *, queued: bool = False) -> None:
        shown = text if len(text) <= LONG else f"{text[:LONG]}… ({len(text)} characters)"
        shown = f"(queued, Up takes it back) {shown}" if queued else shown
        super().__init__(Content(visible(shown)), classes="queued" if queued else None)
        self.turn = turn
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

    def __init__(self, *, ascii_only: bool = False) -> None:
        super().__init__(can_focus=False)
        self._ascii = ascii_only
        self.following = True
        self.tinted = False
        self._conversation = Conversation()
        self._first = 0
        """The earliest turn that is mounted."""
        self._loading = False
        self._lock = asyncio.Lock()
        """Held while messages come or go, as keys, answers and scrolling keep their own time."""

    def on_mount(self) -> None:
        """Start at the end."""
        self.anchor()

    async def show(self, conversation: Conversation) -> None:
        """Show another conversation, its last turns first."""
        async with self._lock:
            self._conversation = conversation
            self._first = max(0, len(conversation.turns) - WINDOW)
            await self.remove_children()
            widgets = self._built(self._first, len(conversation.turns))
            if self._first:
                widgets.insert(0, self._earlier())
            await self.mount_all(widgets)
        last = widgets[-1] if widgets else None
        if isinstance(last, Reply) and last.answer is not None and not last.answer.error:
            last.notice(figures.how_to_go_on(last.answer))
        self.follow()

    async def add(self, *widgets: Widget, instead_of: Sequence[Widget] = ()) -> None:
        """Put messages at the end; the earliest go where many are mounted.

        Args:
            widgets: what comes.
            instead_of: messages that go.
        """
        async with self._lock:
            for widget in instead_of:
                await widget.remove()
            await self.mount(*widgets)
            if self.following:
                await self._drop_far()

    def message_widgets(self) -> list[UserMessage | Reply]:
        """The mounted messages, in order."""
        return [child for child in self.children if isinstance(child, UserMessage | Reply)]

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
        elif not self.following and new_value <= 0 and self._first and not self._loading:
            self._loading = True
            self.call_later(self._load_earlier)

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

    def _built(self, first: int, end: int) -> list[Widget]:
        widgets: list[Widget] = []
        for number in range(first, end):
            turn = self._conversation.turns[number]
            widgets.append(UserMessage(number, turn.current.user))
            if turn.current.answer is not None:
                widgets.append(self.reply(number, turn))
        return widgets

    def new_reply(self, number: int) -> Reply:
        """A reply that is about to be written."""
        return Reply(number, tinted=self.tinted, ascii_only=self._ascii)

    def reply(self, number: int, turn: Turn) -> Reply:
        """A reply that shows the current version of a turn."""
        answer = turn.current.answer
        reply = Reply(number, answer, tinted=self.tinted, ascii_only=self._ascii)
        if len(turn.versions) > 1:
            reply.versions = f" · answer {turn.shown + 1} of {len(turn.versions)}"
        return reply

    def _earlier(self) -> Note:
        return Note(f"{figures.turns(self._first, 'earlier ')}: scroll up", classes="earlier")

    async def _load_earlier(self) -> None:
        async with self._lock:
            first = max(0, self._first - MORE)
            widgets = self._built(first, self._first)
            self._first = first
            below = self.max_scroll_y - self.scroll_y
            with self.app.batch_update():
                await self.query(".earlier").remove()
                head: list[Widget] = [self._earlier()] if first else []
                await self.mount_all([*head, *widgets], before=0)
        self.call_after_refresh(self._keep_place, below)

    def _keep_place(self, below: float) -> None:
        self.scroll_to(y=max(1, self.max_scroll_y - below), animate=False)
        self._loading = False

    async def _drop_far(self) -> None:
        last = len(self._conversation.turns) - 1
        far = [w for w in self.message_widgets() if w.turn <= last - WINDOW]
        if len(far) < 2 * MORE:
            return
        self._first = max(w.turn for w in far) + 1
        with self.app.batch_update():
            await self.query(".earlier").remove()
            for widget in far:
                await widget.remove()
            await self.mount(self._earlier(), before=0)
