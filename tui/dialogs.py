"""Dialogs: choosing from a list, and reading a text; Esc closes either without effect."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from dflash_local.errors import DflashError

from .dialog import Dialog
from .visible import visible


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a list."""

    key: str
    """What the dialog returns."""
    text: str
    enabled: bool = True


class ChooseDialog(Dialog[str | None]):
    """A list; returns the key of the chosen line, or None.

    Args:
        title: above it.
        choices: its lines.
        hint: below it.
        remove: deletes what a key stands for, at the second press of Delete; raises what hinders.
    """

    DEFAULT_CSS = """
    ChooseDialog { align: center middle; }
    ChooseDialog > Vertical {
        width: 90%; max-width: 100; height: auto; max-height: 90%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    ChooseDialog OptionList {
        height: auto; max-height: 20; border: none; background: $surface;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    ChooseDialog Static { color: $text-muted; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close", show=False),
        Binding("ctrl+c", "dismiss(None)", "Close", show=False),
        Binding("delete", "remove", "Delete", show=False),
    ]

    def __init__(
        self,
        title: str,
        choices: Sequence[Choice],
        *,
        hint: str = "",
        remove: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self._title = title
        self._choices = choices
        self._hint = hint or "Enter chooses · Esc closes"
        self._remove = remove
        self._doomed = ""
        """The key that the next Delete deletes."""
        self._below = Static(Content(visible(self._hint)))

    def compose(self) -> ComposeResult:
        """Title, list, hint."""
        options = [
            Option(Content(visible(choice.text)), id=choice.key, disabled=not choice.enabled)
            for choice in self._choices
        ]
        with Vertical():
            yield Static(Content(visible(self._title)))
            yield OptionList(*options)
            yield self._below

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Another line: the first Delete no longer counts."""
        if event.option_id != self._doomed:
            self._doom("")

    def action_remove(self) -> None:
        """Delete what the line stands for, once it was asked for twice."""
        options = self.query_one(OptionList)
        if self._remove is None or options.highlighted is None:
            return
        option = options.get_option_at_index(options.highlighted)
        if option.id is None or option.id != self._doomed:
            self._doom(option.id or "")
            return
        try:
            self._remove(option.id)
        except DflashError as error:
            self.app.notify(visible(str(error)), severity="error", markup=False)
        else:
            options.remove_option(option.id)
        self._doom("")

    def _doom(self, key: str) -> None:
        self._doomed = key
        words = "Delete again deletes it for good · Esc closes" if key else self._hint
        self._below.update(Content(visible(words)))

    def on_resize(self, event: events.Resize) -> None:
        """The list takes what the words around it leave, so that the hint is always seen."""
        width = min(100, event.size.width * 9 // 10) - 4
        words = sum(len(textwrap.wrap(text, width)) for text in (self._title, self._hint))
        room = event.size.height * 9 // 10 - 2 - words
        self.query_one(OptionList).styles.max_height = min(20, max(2, room))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the choice."""
        event.stop()
        self.dismiss(event.option_id)


class TextDialog(Dialog[None]):
    """A text to read and scroll."""

    DEFAULT_CSS = """
    TextDialog { align: center middle; }
    TextDialog > VerticalScroll {
        width: 94%; max-width: 110; height: auto; max-height: 94%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    TextDialog Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,enter,ctrl+c", "dismiss(None)", "Close", show=False),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """The text."""
        with VerticalScroll():
            yield Static(Content(visible(self._text)))
