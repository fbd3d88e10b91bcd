"""Prompt: where the user writes. Enter sends, Shift+Enter or Ctrl+J is a new line."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from .commands import REGISTRY
from .completions import Completions

FOLD = 2000
"""Characters above which a paste is shown as one line."""


class Prompt(TextArea):
    """A text area that knows sending, history and long pastes."""

    DEFAULT_CSS = """
    Prompt {
        height: auto; min-height: 1; max-height: 10; padding: 0 1;
        border: none; border-left: outer $accent; background: $surface;
    }
    Prompt:focus { border: none; border-left: outer $primary; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *REGISTRY.bindings("chat"),
        Binding("enter", "enter", "Send", id="prompt.send"),
        Binding("shift+enter,ctrl+j", "newline", "New line", id="prompt.newline"),
        Binding("tab", "complete", show=False),
        Binding("up", "up", show=False),
        Binding("down", "down", show=False),
        Binding("end", "end", show=False),
    ]

    class Sent(Message):
        """The user sent a text."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Browse(Message):
        """The user asked for an earlier (-1) or later (1) prompt."""

        def __init__(self, direction: int) -> None:
            super().__init__()
            self.direction = direction

    class AtEnd(Message):
        """End was pressed where the line ended already."""

    def __init__(self) -> None:
        super().__init__(
            compact=True,
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            tab_behavior="focus",
            placeholder="Message, or / for commands",
        )
        self.enter_sends = True
        self.send_keys = {"enter"}
        self.newline_keys = {"shift+enter", "ctrl+j"}
        self._pastes: dict[str, str] = {}
        self.completions: Completions | None = None
        """Where a command may be picked by the arrows."""

    @property
    def full_text(self) -> str:
        """The text with folded pastes put back."""
        text = self.text
        for label, pasted in self._pastes.items():
            text = text.replace(label, pasted)
        return text

    def set_text(self, text: str, *, fold: bool = True) -> None:
        """Put a text in, the cursor behind it; a long one folded."""
        self._pastes.clear()
        self.load_text(self._folded(text) if fold else text)
        self.move_cursor(self.document.end)

    def action_enter(self) -> None:
        """Send, or a new line where the setting swaps them; take the command that was picked."""
        if self.completions is not None and self.completions.picked is not None:
            self.action_complete()
        elif self.enter_sends:
            self._send()
        else:
            self.insert("\n")

    def action_newline(self) -> None:
        """A new line, or send where the setting swaps them."""
        if self.enter_sends:
            self.insert("\n")
        else:
            self._send()

    def action_up(self) -> None:
        """Move up; on the first row, go back in the history."""
        if self.cursor_location[0] == 0 and not self.selected_text:
            self.post_message(self.Browse(-1))
        else:
            self.action_cursor_up()

    def action_down(self) -> None:
        """Move down; on the last row, go forward in the history."""
        if self.cursor_location[0] == self.document.line_count - 1 and not self.selected_text:
            self.post_message(self.Browse(1))
        else:
            self.action_cursor_down()

    def action_end(self) -> None:
        """The end of the line, then the end of the chat."""
        if self.cursor_at_end_of_line:
            self.post_message(self.AtEnd())
        else:
            self.action_cursor_line_end()

    async def _on_key(self, event: events.Key) -> None:
        # Sending must keep its place among the keys typed before and after it, which a binding,
        # run by the app in its own time, does not.
        if event.key in self.send_keys:
            event.stop()
            event.prevent_default()
            self.action_enter()
        elif event.key in self.newline_keys:
            event.stop()
            event.prevent_default()
            self.action_newline()

    def action_complete(self) -> None:
        """Complete a slash command, or go to the next widget."""
        actions = REGISTRY.complete(self.text)
        if not actions:
            self.screen.focus_next()
            return
        picked = self.completions.picked if self.completions is not None else None
        self.set_text(f"/{(picked or actions[0]).slash} ")

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")
        self.insert(self._folded(text))

    def _send(self) -> None:
        text = self.full_text
        if text.strip():
            self.clear_all()
            self.post_message(self.Sent(text))

    def clear_all(self) -> None:
        """Empty it."""
        self._pastes.clear()
        self.load_text("")

    def _folded(self, text: str) -> str:
        if len(text) <= FOLD:
            return text
        lines = text.count("\n") + 1
        size = f"{lines} lines" if lines > 1 else f"{len(text)} characters"
        number = f" #{len(self._pastes) + 1}" if self._pastes else ""
        label = f"[pasted {size}{number}]"
        self._pastes[label] = text
        return label
