"""KeyLine: the keys that matter most, each whole, as many as fit; or a word of ours instead."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from textual.content import Content
from textual.widgets import Static

from .help import keys_name
from .visible import visible

KEYS = (
    ("prompt.send", "enter", "send"),
    ("prompt.newline", "ctrl+j", "new line"),
    ("view.help", "f1", "help"),
    ("", "/", "commands"),
    ("chat.escape", "escape", "stop"),
    ("chat.leave", "ctrl+d", "quit"),
    ("view.panel", "ctrl+s", "figures"),
    ("reply.retry", "ctrl+r", "regenerate"),
    ("view.tint", "ctrl+t", "tint"),
    ("view.sessions", "ctrl+b", "chats"),
)
"""Action id, key, words; the most important first."""


def key_line(
    width: int,
    *,
    keymap: Mapping[str, str] | None = None,
    enter_sends: bool = True,
    generating: bool = False,
) -> str:
    """What fits into ``width`` columns; stopping comes first while there is something to stop."""
    mine = dict(keymap or {})
    if not enter_sends:
        mine = {"prompt.send": "ctrl+j", "prompt.newline": "enter"} | mine
    keys = [(action, mine.get(action, key).split(",")[0], words) for action, key, words in KEYS]
    if generating:
        keys.sort(key=lambda entry: entry[0] != "chat.escape")
    line = ""
    for action, key, words in keys:
        words = "queue" if generating and action == "prompt.send" else words
        longer = f"{line} · {keys_name(key)} {words}".removeprefix(" · ")
        if len(longer) > width:
            break
        line = longer
    return line


TWICE_S = 2.0
"""Seconds within which a second press counts."""


class KeyLine(Static):
    """Shows ``key_line`` until ``say`` puts something else there."""

    DEFAULT_CSS = """
    KeyLine { height: 1; padding: 0 1; color: $text-muted; }
    KeyLine.alarm { color: $text-warning; text-style: bold; }
    """

    def __init__(self, *, ascii_only: bool = False) -> None:
        super().__init__()
        self.keymap: Mapping[str, str] = {}
        self.enter_sends = True
        self._generating = False
        self._ascii = ascii_only
        self._said = ""
        self._armed: dict[str, float] = {}

    def say(self, text: str = "", *, alarm: bool = False) -> None:
        """Put a line in place of the keys; the keys again without one."""
        self._said = text
        self.set_class(alarm, "alarm")
        self.set_class(bool(text), "said")
        self.refresh()

    def twice(self, what: str, words: str) -> bool:
        """Whether this is the second press within a moment; the first one is told."""
        if monotonic() - self._armed.get(what, -TWICE_S) < TWICE_S:
            return True
        self._armed[what] = monotonic()
        self.say(words)
        self.set_timer(TWICE_S, self.say)
        return False

    def busy(self, generating: bool) -> None:
        """Whether there is an answer to stop."""
        self._generating = generating
        self.refresh()

    def render(self) -> Content:
        """Fitted to the width at hand."""
        line = self._said or key_line(
            self.content_size.width,
            keymap=self.keymap,
            enter_sends=self.enter_sends,
            generating=self._generating,
        )
        return Content(visible(line.replace("·", "-") if self._ascii else line))
