"""Loader: waits for the engine process on a thread, then times plain decoding.

What it finds out is told in the screen's own time, never from the thread.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from time import monotonic
from typing import Any, Protocol

from textual.message_pump import MessagePump

from dflash_local.backend import BackendInfo, MemoryFigures
from dflash_local.errors import DflashError
from dflash_local.events import LoadProgress, Round
from dflash_local.prompting import Message, Prompt
from dflash_local.sampling import SamplingParams
from dflash_local.service import Service

TIMED_TOKENS = 16
_WARM_UP = 3
"""Rounds left out: the first ones of a process are slower."""


class Audience(Protocol):
    """Who hears how the load goes."""

    def step(self, progress: LoadProgress) -> None:
        """It got further."""
        ...

    async def loaded(self, info: BackendInfo, seconds: float) -> None:
        """The pair is ready."""
        ...

    async def failed(self, error: DflashError) -> None:
        """It could not be loaded."""
        ...

    def timed(self, tok_s: float) -> None:
        """Plain decoding was timed on this machine."""
        ...

    def remember(self, memory: MemoryFigures) -> None:
        """What the engine holds."""
        ...


class Loader:
    """Watches one service; ``screen`` is whose time the audience is told in."""

    def __init__(self, service: Service, screen: MessagePump, audience: Audience) -> None:
        self._service = service
        self._screen = screen
        self._audience = audience
        self.timing = False
        """Plain decoding is being timed; whoever wants an answer stops it first."""
        self._left = False
        """Another loader watches now; what this one still hears is of a process that is gone."""

    def start(self) -> None:
        """Watch the load that is going on."""
        threading.Thread(target=self._run, name="dflash-loader", daemon=True).start()

    def leave(self) -> None:
        """Tell nothing more."""
        self._left = True

    def read_memory(self) -> None:
        """Ask what the engine holds, without waiting for it."""
        threading.Thread(target=self._read_memory, name="dflash-memory", daemon=True).start()

    def _run(self) -> None:
        began = monotonic()
        try:
            info = self._service.wait(lambda event: self._tell(self._audience.step, event))
        except DflashError as error:
            self._tell(self._audience.failed, error)
            return
        self.timing = info.block_size > 1
        self._tell(self._audience.loaded, info, monotonic() - began)
        if self.timing:
            with suppress(DflashError):
                self._time_plain("Count from one to twenty.")
            self.timing = False
        self._read_memory()

    def time_on(self, messages: Sequence[Message]) -> None:
        """Time plain decoding on a chat, where the time after the load did not suffice."""
        self.timing = True

        def run() -> None:
            with suppress(DflashError):
                self._time_plain(self._service.prompt(messages))
            self.timing = False

        threading.Thread(target=run, name="dflash-timing", daemon=True).start()

    def _time_plain(self, prompt: Prompt | str) -> None:
        rounds = [
            event.wall_ms
            for event in self._service.stream(
                prompt, SamplingParams(max_tokens=TIMED_TOKENS), block=0
            )
            if isinstance(event, Round)
        ][_WARM_UP:]
        if len(rounds) >= 3 and median(rounds) > 0:
            self._tell(self._audience.timed, 1000.0 / median(rounds))

    def _read_memory(self) -> None:
        with suppress(DflashError):
            self._tell(self._audience.remember, self._service.memory())

    def _tell(self, what: Callable[..., Any], *values: object) -> None:
        self._screen.call_later(self._deliver, what, *values)

    async def _deliver(self, what: Callable[..., Any], *values: object) -> None:
        if not self._left:
            told = what(*values)
            if inspect.isawaitable(told):
                await told
