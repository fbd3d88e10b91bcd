"""PlainChat: the chat as lines of text, for pipes, dumb terminals and screen readers.

No alternate screen, no redrawing, no colours: roles are words, replies stream as text, and one
sentence of figures ends each turn.
"""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TextIO

from dflash_local.chat import Chat, Conversation
from dflash_local.errors import DflashError
from dflash_local.events import Event, LoadProgress, Text
from dflash_local.service import Service
from dflash_local.sessions import Session, SessionStore

from . import figures
from .visible import visible


class PlainChat:
    """Reads lines, writes lines.

    Args:
        service: the engine, still loading perhaps.
        pair: its name.
        session: where the chat is saved.
        source: where the user's lines come from; None where that is closed.
        target: where everything goes; None where that is closed.
    """

    def __init__(
        self,
        service: Service,
        pair: str,
        session: Session,
        source: TextIO | None,
        target: TextIO | None,
    ) -> None:
        self._service = service
        self._source = source = source or io.StringIO()
        self._target = target or io.StringIO()
        self._typing = source.isatty()
        if isinstance(source, io.TextIOWrapper):
            source.reconfigure(errors="replace")
        self._session = session
        self._chat = Chat(service, session.conversation, model=pair, record=session)
        self._pair = pair
        self._stage = ""

    def run(self, first: str = "") -> int:
        """Chat until the input ends, or nobody reads the output any more."""
        try:
            self._run(first)
        except OSError as error:
            self._drop_output()
            if not isinstance(error, BrokenPipeError):
                raise DflashError(f"The chat cannot go on: {error.strerror or error}.") from error
        finally:
            self._session.close()
        return 0

    def _run(self, first: str) -> None:
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

    def _command(self, text: str) -> None:
        """The few commands of plain mode; an unknown one is never sent."""
        if text == "/retry" and self._chat.conversation.turns:
            self._turn(self._chat.conversation.turns[-1].current.user, self._chat.retry)
        elif text == "/new":
            self._begin_anew()
            self._say("New chat.")
        else:
            self._say("Commands here: /retry, /new, /quit. Begin with // to send a slash.")

    def _begin_anew(self) -> None:
        before, self._session = self._session, self._fresh()
        before.close()
        self._chat = Chat(
            self._service,
            self._session.conversation,
            options=self._chat.options,
            model=self._pair,
            record=self._session,
        )

    def _fresh(self) -> Session:
        store = SessionStore(self._session.path.parent)
        return store.create(Conversation(self._chat.conversation.system), self._pair)

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
            self._say("")  # the shell's prompt belongs on a line of its own
            return ""
        except KeyboardInterrupt:
            self._say("")
            raise

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
        trouble = self._session.trouble()
        if trouble is not None:
            self._say(str(trouble))

    def _say(self, line: str) -> None:
        self._write(line + "\n")

    def _write(self, text: str) -> None:
        encoding = self._target.encoding or "utf-8"
        self._target.write(text.encode(encoding, errors="replace").decode(encoding))
        self._target.flush()

    def _drop_output(self) -> None:
        """Send what is still buffered nowhere, or the interpreter would complain at its end."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._target.fileno())
            os.close(nowhere)


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
