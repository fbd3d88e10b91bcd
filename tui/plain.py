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

from dflash_local.chat import Chat
from dflash_local.errors import ContextFull, DflashError
from dflash_local.events import Event, LoadProgress, Text
from dflash_local.sampling import SamplingParams
from dflash_local.service import Service
from dflash_local.sessions import Session

from . import figures
from .commands import REGISTRY
from .goodbye import Given, where_it_is
from .loading import LOADED
from .plain_commands import COMMANDS
from .visible import one_line, visible


class PlainChat:
    """Reads lines, writes lines.

    Args:
        service: the engine, still loading perhaps.
        pair: its name.
        session: where the chat is saved.
        source: where the user's lines come from; None where that is closed.
        target: where everything goes; None where that is closed.
        given: for the command that goes on.
    """

    def __init__(
        self,
        service: Service,
        pair: str,
        session: Session,
        source: TextIO | None,
        target: TextIO | None,
        given: Given | None = None,
    ) -> None:
        self.service = service
        self._source = source = source or io.StringIO()
        self._target = target or io.StringIO()
        self._typing = source.isatty()
        if isinstance(source, io.TextIOWrapper):
            source.reconfigure(errors="replace")
        self.session = session
        self.chat = Chat(service, session.conversation, model=pair, record=session)
        self.pair = pair
        self.rows = 0
        """Of the pair, once it is loaded."""
        self.leaving = False
        """The user asked to leave."""
        self._stage = ""
        self._given = given or Given()

    def run(self, first: str = "", words: str = "") -> int:
        """Say ``words``, chat until the input ends or nobody reads the output any more."""
        try:
            try:
                self._run(first, words)
            except KeyboardInterrupt:
                self.say("")  # what follows ^C belongs on a line of its own
                raise
            finally:
                for line in where_it_is(self.session, self.pair, self._given):
                    self.say(line)
        except OSError as error:
            self._drop_output()
            if not isinstance(error, BrokenPipeError):
                raise DflashError(f"The chat cannot go on: {error.strerror or error}.") from error
        finally:
            self.session.close()
        return 0

    def _run(self, first: str, words: str) -> None:
        if words:
            self.say(words)
        if self.chat.conversation.turns:
            self.say_where()
        self.say(f"Loading {self.pair}.")
        info = self.service.wait(self._progress)
        draft = f" with {info.draft}" if info.draft else ""
        self.say(f"Ready: {info.target}{draft}.")
        self.say("/help lists the commands. An empty line or Ctrl+D ends the chat.")
        self.rows = info.rows(SamplingParams())
        if self._typing:
            with suppress(ImportError):
                import readline  # noqa: F401 - line editing for input()
        text = first
        while not self.leaving and (text or (text := self._ask())):
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
            else:
                text = text.removeprefix("/")
                self.turn(text, partial(self.chat.send, text))
            text = ""

    def go_to(self, session: Session) -> None:
        """Go on with another chat; this one stays saved."""
        self.session.close()
        self.session = session
        self.chat = Chat(
            self.service,
            session.conversation,
            options=self.chat.options,
            model=self.pair,
            record=session,
        )

    def say_where(self) -> None:
        """Which chat this is, and what can be done about its last answer."""
        conversation, last = self.chat.conversation, self.chat.last
        title = one_line(conversation.title, 60)
        self.say(f"Going on with: {title}, {figures.turns(len(conversation.turns))}.")
        if last is not None and (words := figures.how_to_go_on(last)):
            self.say(words)

    def _command(self, text: str) -> None:
        """Run a slash command; an unknown one is never sent."""
        try:
            action, argument = REGISTRY.parse(text, COMMANDS)
            run = COMMANDS.get(action.slash)
            if run is None:
                self.say(
                    f"/{action.slash} needs the full screen: start in a terminal, without --plain."
                )
            else:
                run(self, argument)
        except DflashError as error:
            if not self.service.alive:
                raise
            self.say(str(error))

    def _progress(self, event: LoadProgress) -> None:
        if event.stage not in (self._stage, LOADED):
            self._stage = event.stage
            self.say(f"Loading: {event.stage}.")

    def _ask(self) -> str:
        try:
            if self._typing:
                return input("You: ").strip()
            return self._source.readline().strip()
        except EOFError:
            self.say("")  # the shell's prompt belongs on a line of its own
            return ""

    def turn(self, text: str, make: Callable[[], Iterator[Event]]) -> None:
        """Answer ``text``, or go on where it is empty."""
        if text and not self._typing:
            self.say(f"You: {text}")
        self._write("Assistant: ")
        thought = False
        try:
            with _StopOnInterrupt(self.service):
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
            self.say(f"\nError: {error}")
            if isinstance(error, ContextFull):
                self.say("/room leaves the oldest turns out, then /retry answers.")
            if not self.service.alive:
                raise
            return
        answer = self.chat.last
        self.say("")
        if answer is not None:
            self.say(figures.sentence(answer))
        trouble = self.session.trouble()
        if trouble is not None:
            self.say(str(trouble))

    def say(self, line: str) -> None:
        """One line."""
        self._write(visible(line) + "\n")

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
