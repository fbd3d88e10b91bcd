"""Client: runs an answer on a thread and keeps what came until the screen asks for it.

The screen asks at its own pace, so no token rate can flood it. Text is never dropped; of rounds
only the latest are kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dflash_local.errors import DflashError
from dflash_local.events import Done, Event, Prefill, Round, Text

ROUNDS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Update:
    """What came since the last time."""

    texts: tuple[Text, ...] = ()
    rounds: tuple[Round, ...] = ()
    prefill: Prefill | None = None
    done: Done | None = None
    error: DflashError | None = None
    ended: bool = False
    """Nothing more comes; the conversation holds the answer."""


class Client:
    """One answer at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._texts: list[Text] = []
        self._rounds: deque[Round] = deque(maxlen=ROUNDS_KEPT)
        self._prefill: Prefill | None = None
        self._done: Done | None = None
        self._error: DflashError | None = None
        self._ended = False

    @property
    def busy(self) -> bool:
        """An answer is on its way, or its end was not taken yet."""
        return self._thread is not None

    def start(self, answer: Callable[[], Iterator[Event]]) -> None:
        """Run an answer; ``answer`` makes its events, on the thread."""
        assert self._thread is None, "one answer at a time"
        self._clear()
        self._thread = threading.Thread(
            target=self._run, args=(answer,), name="dflash-client", daemon=True
        )
        self._thread.start()

    def take(self) -> Update:
        """What came since the last call."""
        with self._lock:
            update = Update(
                tuple(self._texts),
                tuple(self._rounds),
                self._prefill,
                self._done,
                self._error,
                self._ended,
            )
            self._texts.clear()
            self._rounds.clear()
            self._prefill = None
            if self._ended:
                self._thread = None
        return update

    def join(self, seconds: float) -> None:
        """Wait for the running answer to end."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _clear(self) -> None:
        self._texts.clear()
        self._rounds.clear()
        self._prefill = self._done = self._error = None
        self._ended = False

    def _run(self, answer: Callable[[], Iterator[Event]]) -> None:
        try:
            for event in answer():
                with self._lock:
                    self._keep(event)
        except DflashError as error:
            self._error = error
        finally:
            with self._lock:
                self._ended = True

    def _keep(self, event: Event) -> None:
        if isinstance(event, Text):
            self._texts.append(event)
        elif isinstance(event, Round):
            self._rounds.append(event)
        elif isinstance(event, Prefill):
            self._prefill = event
        elif isinstance(event, Done):
            self._done = event
