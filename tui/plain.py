"""PlainChat: the chat as lines of text, for pipes, dumb terminals and screen readers.

No alternate screen, no redrawing, no colours: roles are words, replies stream as text, and one
sentence of figures ends each turn.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TextIO

from dflash_local.chat import Chat
from dflash_local.errors import DflashError
from dflash_local.events import Event, LoadProgress, Text
from dflash_local.service import Service
from dflash_local.sessions import Session

from . import figures
from .visible import visible


class PlainChat:
    """Reads lines, writes lines.

    Args:
        service: the engine, still loading perhaps.
        pair: its name.
        session: where the chat is saved.
        source: where the user's lines come from.
        target: where everything goes.
    """

    def __init__(
        self, service: Service, pair: str, session: Session, source: TextIO, target: TextIO
    ) -> None:
        self._service = service
        self._source = source
        self._target = target
        self._typing = source.isatty()
        self._session = session
        self._chat = Chat(service, session.conversation, model=pair, record=session)
        self._pair = pair
        self._stage = ""

    def run(self, first: str = "") -> int:
        """Chat until the input ends."""
        self._say(f"Loading {self._pair}.")
        info = self._service.wait(self._progress)
        draft = f" with {info.draft}" if info.draft else ""
        self._say(f"Ready: {info.target}{draft}. An empty line or Ctrl+D ends the chat.")
        if self._typing:
            with suppress(ImportError):
                import readline  # noqa: F401 - line editing for input()
        text = first
        while text or (text := self._ask()):
            if text == "/quit":
                break
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
            else:
                self._turn(text, partial(self._chat.send, text.removeprefix("/")))
            text = ""
        return 0

    def _command(self, text: str) -> None:
        """The few commands of plain mode; an unknown one is never sent."""
        if text == "/retry" and self._chat.conversation.turns:
            self._turn(self._chat.conversation.turns[-1].current.user, self._chat.retry)
        elif text == "/new":
            self._chat.cut(0)
            self._say("New chat.")
        else:
            self._say("Commands here: /retry, /new, /quit. Begin with // to send a slash.")

    def _progress(self, event: LoadProgress) -> None:
        if event.stage != self._stage:
            self._stage = event.stage
            self._say(f"Loading: {event.stage}.")

    def _ask(self) -> str:
        try:
            if self._typing:
                return input("You: ").strip()
            return self._source.readline().strip()
        except EOFError:
            return ""

    def _turn(self, text: str, make: Callable[[], Iterator[Event]]) -> None:
        if not self._typing:
            self._say(f"You: {visible(text)}")
        self._write("Assistant: ")
        thought = False
        try:
            with _StopOnInterrupt(self._service):
                for event in make():
                    if not isinstance(event, Text):
                        continue
                    for piece in event.pieces:
                        if piece.channel == "think" and not thought:
                            thought = True
                            self._write("(thinking) ")
                        elif piece.channel == "answer" and thought:
                            thought = False
                            self._write("\n(answer) ")
                        self._write(visible(piece.text))
        except DflashError as error:
            self._say(f"\nError: {error}")
            if not self._service.alive:
                raise
            return
        answer = self._chat.last
        self._say("")
        if answer is not None:
            self._say(figures.sentence(answer))

    def _say(self, line: str) -> None:
        self._write(line + "\n")

    def _write(self, text: str) -> None:
        encoding = self._target.encoding or "utf-8"
        self._target.write(text.encode(encoding, errors="replace").decode(encoding))
        self._target.flush()


class _StopOnInterrupt:
    """Ctrl+C stops the answer instead of the program."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def __enter__(self) -> None:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._stop)

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _stop(self, _: int, __: FrameType | None) -> None:
        self._service.stop()
