"""The engine process: reads requests from its standard input, writes events to its output.

The main thread reads, one thread loads and answers, one thread writes. What libraries print goes
to the log file that is this process's standard error. When the app is gone, so is this process.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import BinaryIO

from dflash_local import service_wire as wire
from dflash_local.engine import Engine, Opened
from dflash_local.errors import explained
from dflash_local.events import Event, LoadProgress, Round

BACKLOG = 2000
"""Items waiting for the app beyond which rounds (never text) are dropped."""
CLOSE_S = 0.7
"""How long a closing engine may take before the process simply ends."""

_Outgoing = wire.Response | tuple[int, Event]


class _Outbox:
    """Responses on their way to the app; a thread of its own writes them."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="dflash-outbox", daemon=True).start()

    def put(self, item: _Outgoing) -> None:
        """Send a response, or one event of a request."""
        self._queue.put(item)

    def _write(self) -> None:
        try:
            while True:
                items = [self._queue.get()]
                while not self._queue.empty():
                    items.append(self._queue.get())
                for frame in frames(items):
                    wire.write(self._pipe, frame)
        except OSError:
            os._exit(0)  # the app is gone


def frames(items: Iterable[_Outgoing]) -> list[wire.Response]:
    """Neighbouring events of one request joined; rounds left out of a long backlog."""
    waiting = list(items)
    crowded = len(waiting) > BACKLOG
    result: list[wire.Response] = []
    number, events = 0, list[Event]()

    def close_batch() -> None:
        if events:
            result.append(wire.Batch(number, tuple(events)))
            events.clear()

    for item in waiting:
        if not isinstance(item, tuple):
            close_batch()
            result.append(item)
            continue
        if item[0] != number:
            close_batch()
        number = item[0]
        if not (crowded and isinstance(item[1], Round)):
            events.append(item[1])
    close_batch()
    return result


class _Worker:
    """Owns the engine: loads it, then answers one request after the other."""

    def __init__(self, outbox: _Outbox) -> None:
        self._outbox = outbox
        self._inbox: queue.SimpleQueue[wire.Start | wire.Ask | wire.Call] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._unfinished: set[int] = set()
        """Answers that run or wait."""
        self._running: int | None = None
        self._stopped: set[int] = set()
        """Those of the unfinished that are to end."""
        threading.Thread(target=self._run, name="dflash-worker", daemon=True).start()

    def put(self, request: wire.Start | wire.Ask | wire.Call) -> None:
        """Do this after what was asked before."""
        if isinstance(request, wire.Ask):
            with self._lock:
                self._unfinished.add(request.number)
        self._inbox.put(request)

    def stop(self, number: int) -> None:
        """End an answer that runs or waits; one that has ended is no matter."""
        with self._lock:
            if number not in self._unfinished:
                return
            self._stopped.add(number)
            # The engine stops whatever it is at, and the lock keeps that from being another one.
            if number == self._running and self._engine is not None:
                self._engine.stop()

    def close(self) -> None:
        """Close the engine, if there is one by now."""
        if self._engine is not None:
            self._engine.close()

    def _run(self) -> None:
        while True:
            request = self._inbox.get()
            number = wire.LOAD if isinstance(request, wire.Start) else request.number
            try:
                if isinstance(request, wire.Start):
                    self._load(request)
                elif isinstance(request, wire.Ask):
                    self._answer(request)
                else:
                    value = getattr(self._engine, request.method)(*request.arguments)
                    self._outbox.put(wire.Returned(number, value))
            except BaseException as error:  # every failure belongs to the one who asked
                traceback.print_exc()
                self._outbox.put(wire.Failed(number, explained(error)))

    def _load(self, request: wire.Start) -> None:
        def progress(event: LoadProgress) -> None:
            self._outbox.put((wire.LOAD, event))

        opener: Callable[[], Opened] = partial(request.opener, progress)
        self._engine = Engine(opener)
        self._outbox.put(wire.Ready(self._engine.info))

    def _answer(self, ask: wire.Ask) -> None:
        with self._lock:
            self._running = ask.number
        try:
            assert self._engine is not None
            for event in self._engine.stream(
                ask.messages,
                ask.sampling,
                block=ask.block,
                thinking=ask.thinking,
                reuse=ask.reuse,
            ):
                self._outbox.put((ask.number, event))
                # A stop may have come before the engine began on this answer.
                if ask.number in self._stopped:
                    self._engine.stop()
        finally:
            with self._lock:
                self._running = None
                self._unfinished.discard(ask.number)
                self._stopped.discard(ask.number)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes for ourselves and give libraries the log in their place."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    return incoming, outgoing


def main() -> None:
    """Serve until the app closes the engine or goes away."""
    incoming, outgoing = _take_pipes()
    # Ctrl+C reaches the whole foreground group; the app decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    worker = _Worker(_Outbox(outgoing))
    try:
        while True:
            request = wire.read(incoming)
            if isinstance(request, wire.Stop):
                worker.stop(request.number)
            elif isinstance(request, wire.Close):
                closing = threading.Thread(target=worker.close, daemon=True)
                closing.start()
                closing.join(CLOSE_S)
                break
            elif isinstance(request, wire.Start | wire.Ask | wire.Call):
                worker.put(request)
    except EOFError:
        pass
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a load or a round in native code must not hold the exit up


if __name__ == "__main__":
    main()
