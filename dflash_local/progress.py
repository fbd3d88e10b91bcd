"""How far a pull is: one event type, and the meter that counts the bytes of parallel files."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PullStage = Literal["listing", "wait", "download", "retry", "verify", "unpack", "convert", "swept"]


@dataclass(frozen=True, slots=True)
class PullProgress:
    """One step of a pull; only strings and numbers, so it can be pickled."""

    stage: PullStage
    """``listing`` asks the hub; ``wait`` is for another process that fetches the same file;
    ``retry`` follows a failure that may pass; ``swept`` counts partial files thrown away."""
    item: str
    """What is at it: a repository, a file, or the pair."""
    done: int = 0
    """Bytes so far, over all files of the pull; includes what an earlier run had fetched."""
    total: int = 0
    """Bytes in all; 0 where not known."""
    rate: float = 0.0
    """Bytes per second over the last seconds; 0 while unknown."""
    seconds_left: float | None = None
    note: str = ""
    """One line for a person, where there is something to say."""


PullReport = Callable[[PullProgress], None]


def silent(step: PullProgress) -> None:
    """A listener that ignores everything."""


class Meter:
    """Sums the bytes of files that arrive in several threads and reports now and then.

    Args:
        item: the name that the events carry.
        total: bytes of all files.
        report: gets the events; called by one thread at a time.
        clock: seconds, for tests.
    """

    INTERVAL = 0.1
    WINDOW = 5.0

    def __init__(
        self,
        item: str,
        total: int,
        report: PullReport,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._item = item
        self._total = total
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        self._done: dict[str, int] = {}
        self._received = 0
        """Bytes from the network; what was there already must not count as speed."""
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)])
        self._last = float("-inf")

    def at(self, file: str, done: int, received: int = 0) -> None:
        """Set the bytes of one file; ``received`` of them came in just now."""
        with self._lock:
            self._done[file] = done
            self._received += received
            now = self._clock()
            finished = sum(self._done.values()) >= self._total
            if now - self._last < self.INTERVAL and not finished:
                return
            self._last = now
            self._report(self._event(now))

    def note(self, stage: PullStage, item: str, note: str) -> None:
        """Report something that is not a number of bytes."""
        with self._lock:
            done = sum(self._done.values())
            self._report(PullProgress(stage, item, done, self._total, note=note))

    def _event(self, now: float) -> PullProgress:
        self._marks.append((now, self._received))
        while len(self._marks) > 2 and now - self._marks[0][0] > self.WINDOW:
            self._marks.popleft()
        then, received = self._marks[0]
        rate = (self._received - received) / (now - then) if now > then else 0.0
        done = sum(self._done.values())
        left = (self._total - done) / rate if rate > 0 else None
        return PullProgress("download", self._item, done, self._total, rate, left)
