"""PullDialog: downloads a pair by the command line's own pull, with its progress and a cancel."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import ProgressBar, Static

from .dialog import Dialog
from .visible import one_line, visible

_AMOUNT = re.compile(r"(\d+) of (\d+) MB")


def command(name: str) -> list[str]:
    """The download as a process, which a cancel can end at any point."""
    return [sys.executable, "-m", "dflash_local", "pull", name]


class PullDialog(Dialog[bool]):
    """Returns whether the pair is here now."""

    DEFAULT_CSS = """
    PullDialog { align: center middle; }
    PullDialog > Vertical {
        width: 90%; max-width: 90; height: auto; border: round $primary;
        background: $surface; padding: 0 1;
    }
    PullDialog Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "cancel", "Cancel", show=False),
        Binding("enter", "again", "Again", show=False),
    ]

    class Said(Message):
        """A line of the download."""

        def __init__(self, line: str) -> None:
            super().__init__()
            self.line = line

    class Ended(Message):
        """The download's exit status and last words."""

        def __init__(self, status: int, words: str) -> None:
            super().__init__()
            self.status = status
            self.words = words

    def __init__(self, name: str, question: str = "") -> None:
        super().__init__()
        self._pair = name
        self._question = question
        self._process: subprocess.Popen[str] | None = None
        self._title = Static(Content(visible(question)))
        self._words = Static()
        self._bar = ProgressBar(total=None, show_eta=False)
        self._hint = Static(Content("Enter downloads it · Esc closes"))

    def compose(self) -> ComposeResult:
        """Words, bar, hint."""
        with Vertical():
            yield self._title
            yield self._words
            yield self._bar
            yield self._hint

    def on_mount(self) -> None:
        """Start, unless there is something to ask before."""
        self._bar.display = False
        if not self._question:
            self.action_again()

    def on_unmount(self) -> None:
        """Leave no download behind."""
        self._kill()

    def action_again(self) -> None:
        """Start, or go on where it stopped."""
        if self._process is not None:
            return
        self._bar.display = True
        self._title.update(Content(visible(f"Downloading {self._pair}")))
        self._hint.update(Content("Esc cancels; what is here is kept for the next time."))
        self._process = subprocess.Popen(
            command(self._pair),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def action_cancel(self) -> None:
        """Stop and close."""
        self._kill()
        self.dismiss(False)

    def on_pull_dialog_said(self, event: Said) -> None:
        """Show a line and, where it tells an amount, the bar."""
        self._words.update(Content(one_line(event.line, 200)))
        amount = _AMOUNT.search(event.line)
        if amount:
            self._bar.update(total=float(amount[2]), progress=float(amount[1]))

    def on_pull_dialog_ended(self, event: Ended) -> None:
        """Close on success, explain a failure."""
        self._process = None
        if event.status == 0:
            self.dismiss(True)
            return
        self._words.update(Content(visible(event.words or f"It ended with {event.status}.")))
        self._hint.update(Content("Enter tries again from where it stopped · Esc closes"))

    def _read(self, process: subprocess.Popen[str]) -> None:
        last = ""
        assert process.stderr is not None
        for line in process.stderr:
            if line.strip():
                last = line.strip()
                self.post_message(self.Said(last))
        self.post_message(self.Ended(process.wait(), last))

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
