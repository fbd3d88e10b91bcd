"""Service: the engine's surface with the engine in a process of its own.

A slow screen cannot slow the model, a crash of the model cannot take the chat along, and ending
the process surely gives its memory back. Started with plain pipes, so it also works inside a
running full-screen app, where ``multiprocessing`` does not.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from dflash_local import service_wire as wire
from dflash_local.backend import BackendInfo, MemoryFigures
from dflash_local.errors import DflashError, EngineError
from dflash_local.events import Done, Event, LoadProgress
from dflash_local.paths import log_dir
from dflash_local.prompting import Message, Prompt
from dflash_local.sampling import SamplingParams
from dflash_local.service_wire import ServiceOpener

CLOSE_S = 1.2
"""How long the process may take to end by itself."""
NO_LOG = Path(os.devnull)
"""Where the output goes when no log can be written."""
_LOGS_KEPT = 5

_Item = Event | DflashError | wire.Ready | wire.Returned


class _Child:
    """One engine process from its start to its end."""

    def __init__(self, opener: ServiceOpener, log: Path) -> None:
        self.log = log
        self.error: DflashError | None = None
        """Why the process is gone, once it is."""
        self._boxes: dict[int, queue.SimpleQueue[_Item]] = {wire.LOAD: queue.SimpleQueue()}
        self._asked: list[int] = []
        """Answers that have not ended, the running one first."""
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._closing = False
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dflash_local.service_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
            )
        self._pipe = cast(BinaryIO, self.process.stdin)
        threading.Thread(target=self._read, name="dflash-service", daemon=True).start()
        self.send(wire.Start(opener))

    def box(self, number: int) -> queue.SimpleQueue[_Item]:
        """Where what belongs to a request arrives; made on first use."""
        with self._lock:
            box = self._boxes.setdefault(number, queue.SimpleQueue())
            if self.error is not None:
                box.put(self.error)
            return box

    def forget(self, number: int) -> None:
        """Nothing more is expected for a request."""
        with self._lock:
            self._boxes.pop(number, None)
            self._ended(number)

    def ask(self, ask: wire.Ask) -> None:
        """Request an answer."""
        # Under the lock, so that the list has the order in which the process gets them.
        with suppress(OSError, ValueError), self._write_lock:
            with self._lock:
                self._asked.append(ask.number)
            wire.write(self._pipe, ask)

    def stop(self) -> bool:
        """Stop the running answer; False where there is none."""
        with self._lock:
            number = self._asked[0] if self._asked else None
        if number is not None:
            self.send(wire.Stop(number))
        return number is not None

    def send(self, frame: wire.Request) -> None:
        """Write a request; one to a dead process is answered by its error."""
        # The reader finds the end of the process and tells everybody.
        with suppress(OSError, ValueError), self._write_lock:
            wire.write(self._pipe, frame)

    def close(self) -> None:
        """End the process: kindly, then by force."""
        self._closing = True
        self.send(wire.Close())
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self._write_lock, suppress(OSError):
            self._pipe.close()

    def _read(self) -> None:
        pipe = cast(BinaryIO, self.process.stdout)
        try:
            while True:
                self._deliver(wire.read(pipe))
        except (EOFError, OSError):
            pass
        pipe.close()
        error = self._end(self.process.wait())
        with self._lock:
            self.error = error
            for box in self._boxes.values():
                box.put(error)

    def _deliver(self, frame: wire.Request | wire.Response) -> None:
        if isinstance(frame, wire.Batch):
            items: tuple[_Item, ...] = frame.events
            number = frame.number
        elif isinstance(frame, wire.Ready):
            number, items = wire.LOAD, (frame,)
        elif isinstance(frame, wire.Failed):
            number, items = frame.number, (frame.error,)
        else:
            assert isinstance(frame, wire.Returned)
            number, items = frame.number, (frame,)
        with self._lock:
            box = self._boxes.get(number)
            if any(isinstance(item, Done | DflashError) for item in items):
                self._ended(number)
        if box is not None:
            for item in items:
                box.put(item)

    def _ended(self, number: int) -> None:
        if number in self._asked:
            self._asked.remove(number)

    def _end(self, status: int) -> DflashError:
        if self._closing:
            return EngineError("The engine is closed.", "Load it again.")
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        # The kernel's out-of-memory killer uses signal 9, and nothing else of ours does.
        reason = ", perhaps for lack of memory" if status == -9 else ""
        log = "." if self.log == NO_LOG else f"; its log is {self.log}."
        return EngineError(f"The engine process ended {how}{reason}.", f"Reload it{log}")


class _Stream(Iterator[Event]):
    """The events of a request, which is forgotten even where it never began.

    A generator that was never started runs none of its code when it is closed.
    """

    def __init__(self, events: Generator[Event, None, None], forget: Callable[[], object]) -> None:
        self._events = events
        self._forget = forget

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Stop the answer."""
        self._events.close()
        self._forget()

    def __del__(self) -> None:
        self.close()


class Service:
    """A pair in a process of its own; ``wait`` for it, then use it as an ``Engine``.

    Args:
        opener: loads the pair; must pickle, so it lives in an importable module.
        log: file for what the process prints; one in the log folder by default. Without a log
            where it cannot be written.
    """

    def __init__(self, opener: ServiceOpener, *, log: Path | None = None) -> None:
        self._opener = opener
        self._log = _log_file(log)
        self._next = wire.LOAD
        self._unstarted: dict[int, bool] = {}
        """Streams nobody has read from yet, and whether they were stopped."""
        self._info: BackendInfo | None = None
        self._child = _Child(opener, self._log)

    @property
    def info(self) -> BackendInfo:
        """What is loaded.

        Raises:
            EngineError: the load has not ended yet.
        """
        if self._info is None:
            raise EngineError("The engine is still loading.", "Wait for it.")
        return self._info

    @property
    def log(self) -> Path:
        """The file that holds what the process and its libraries printed."""
        return self._log

    @property
    def pid(self) -> int:
        """The process."""
        return self._child.process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child.error is None and self._child.process.poll() is None

    def wait(self, progress: Callable[[LoadProgress], None] | None = None) -> BackendInfo:
        """Block until the pair is loaded, reporting progress meanwhile.

        Raises:
            DflashError: the load failed, or the process ended.
        """
        box = self._child.box(wire.LOAD)
        while self._info is None:
            item = box.get()
            if isinstance(item, DflashError):
                raise item
            if isinstance(item, wire.Ready):
                self._info = item.info
            elif isinstance(item, LoadProgress) and progress is not None:
                progress(item)
        self._child.forget(wire.LOAD)
        return self._info

    def reload(self, opener: ServiceOpener | None = None) -> None:
        """End the process, whatever its state, and start another; ``wait`` for it again."""
        self._child.close()
        self._opener = opener or self._opener
        self._info = None
        self._unstarted.clear()
        self._child = _Child(self._opener, self._log)

    def prompt(self, messages: Sequence[Message] | str, thinking: bool | None = None) -> Prompt:
        """The ids of a request, as ``Engine.prompt`` makes them."""
        asked = messages if isinstance(messages, str) else tuple(messages)
        return cast(Prompt, self._call("prompt", asked, thinking))

    def memory(self) -> MemoryFigures:
        """Bytes held; waits for a running answer."""
        return cast(MemoryFigures, self._call("memory"))

    def margin(self, ids: Sequence[int]) -> float:
        """Top-1 minus top-2 logit of the target after ``ids``."""
        return cast(float, self._call("margin", tuple(ids)))

    def stream(
        self,
        messages: Sequence[Message] | Sequence[int] | str | Prompt,
        sampling: SamplingParams | None = None,
        *,
        block: int | None = None,
        thinking: bool | None = None,
        reuse: bool = True,
    ) -> Iterator[Event]:
        """Answer, event by event, as ``Engine.stream`` does; text is never dropped.

        Raises:
            DflashError: the request cannot be honoured, or the process ended.
        """
        asked = messages if isinstance(messages, str | Prompt) else tuple(messages)
        ask = wire.Ask(
            self._number(),
            cast("tuple[Message, ...] | tuple[int, ...] | str | Prompt", asked),
            sampling,
            block,
            thinking,
            reuse,
        )
        self._unstarted[ask.number] = False
        events = self._events(self._child, ask)
        return _Stream(events, partial(self._unstarted.pop, ask.number, None))

    def stop(self) -> None:
        """End the running answer after its current round; from any thread.

        With none running, the first of those that were asked for ends as soon as it begins.
        """
        if not self._child.stop():
            for number in tuple(self._unstarted)[:1]:
                self._unstarted[number] = True

    def close(self) -> None:
        """End the process and give its memory back. Safe to call twice."""
        self._child.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _events(self, child: _Child, ask: wire.Ask) -> Generator[Event, None, None]:
        box = child.box(ask.number)
        ended = False
        try:
            child.ask(ask)
            if self._unstarted.pop(ask.number, False):
                child.send(wire.Stop(ask.number))
            while not ended:
                item = box.get()
                ended = isinstance(item, Done | DflashError)
                if isinstance(item, DflashError):
                    raise item
                assert not isinstance(item, wire.Ready | wire.Returned)
                yield item
        finally:
            if not ended:
                child.send(wire.Stop(ask.number))
            while not ended:
                ended = isinstance(box.get(), Done | DflashError)
            child.forget(ask.number)

    def _call(self, method: str, *arguments: object) -> object:
        child, number = self._child, self._number()
        box = child.box(number)
        child.send(wire.Call(number, method, arguments))
        item = box.get()
        child.forget(number)
        if isinstance(item, DflashError):
            raise item
        assert isinstance(item, wire.Returned)
        return item.value


def _log_file(wanted: Path | None) -> Path:
    """A file that can be written: the wanted one, else a new one; ``NO_LOG`` where none can be."""
    try:
        log = wanted or log_dir() / f"engine-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if wanted is None:
            for old in sorted(log.parent.glob("engine-*.log"))[: -(_LOGS_KEPT - 1)]:
                old.unlink(missing_ok=True)
        log.open("ab").close()
    except OSError:
        return NO_LOG
    return log
