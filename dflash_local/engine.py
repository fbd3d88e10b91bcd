"""Engine: owns a backend on a thread of its own; stream, stop, close.

MLX arrays belong to the thread that made them, so one thread loads, generates and closes.
Requests from several threads queue up; one runs at a time.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from dflash_local.backend import Backend, BackendInfo, MemoryFigures
from dflash_local.costs import Costs
from dflash_local.errors import DflashError, EngineError, OptionError, explained
from dflash_local.events import Done, Event, Resumed
from dflash_local.lookup import Lookup
from dflash_local.loop import generate
from dflash_local.prompting import ChatTokenizer, Message, Prompt, build_prompt, check_ids
from dflash_local.reply import Reply, reply_of
from dflash_local.sampling import SamplingParams
from dflash_local.text import ReplyText
from dflash_local.width import AutoWidth, FixedWidth, TwoWidths, Width

_T = TypeVar("_T")


@dataclass(slots=True)
class _Request:
    """One answer on its way: what is asked, and where its events go."""

    prompt: Prompt
    sampling: SamplingParams
    width: Width
    reuse: bool
    events: queue.SimpleQueue[Event | BaseException] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)


class _Call(Generic[_T]):
    """A function to run on the engine's thread, and its outcome."""

    def __init__(self, function: Callable[[Backend], _T]) -> None:
        self._function = function
        self._result: _T | BaseException
        self._finished = threading.Event()

    def run(self, backend: Backend) -> bool:
        """Run it; False when it raised."""
        try:
            self._result = self._function(backend)
        except BaseException as error:  # handed to the thread that asked
            self._result = _explained(error)
        self._finished.set()
        return not isinstance(self._result, BaseException)

    def wait(self) -> _T:
        """The result, or the error."""
        self._finished.wait()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class Opened(NamedTuple):
    """What an opener gives; a plain pair of the first two will do."""

    backend: Backend
    tokenizer: ChatTokenizer
    costs: Costs | None = None
    """What rounds cost here; with it the width follows what pays, else it is the whole block."""


class Engine:
    """A loaded pair, ready to answer.

    Args:
        opener: loads backend and tokenizer; runs on the engine's thread.

    Raises:
        DflashError: what ``opener`` raised, in one line whatever it was.
    """

    def __init__(self, opener: Callable[[], Opened | tuple[Backend, ChatTokenizer]]) -> None:
        self._inbox: queue.SimpleQueue[_Request | _Call[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished: deque[_Request] = deque()
        """The running request and those behind it, in order."""
        self._closed = False
        self._held: list[int] = []
        """Ids that the caches hold; only the engine's thread touches it."""
        self._lookup = Lookup()
        """Of the running answer; likewise."""
        opened: queue.SimpleQueue[Opened | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(opener, opened), name="dflash-engine", daemon=True
        )
        self._thread.start()
        outcome = opened.get()
        if isinstance(outcome, BaseException):
            self._closed = True
            raise outcome
        self.tokenizer = outcome.tokenizer
        self.info: BackendInfo = outcome.backend.info
        self.costs = outcome.costs
        """What rounds cost here; None where the width does not follow it."""
        self._widths: dict[int, Width] = {}
        """By the most rows of a verify: what a tree yields says little of a path."""

    def prompt(
        self, messages: Sequence[Message] | Sequence[int] | str, thinking: bool | None = None
    ) -> Prompt:
        """The ids of a request: messages through the chat template, text as one user message.

        Raises:
            OptionError: nothing to answer, an unknown role, or an id outside the vocabulary.
        """
        return build_prompt(self.tokenizer, self.info.vocab_size, messages, thinking)

    def stream(
        self,
        messages: Sequence[Message] | Sequence[int] | str | Prompt,
        sampling: SamplingParams | None = None,
        *,
        block: int | None = None,
        width: Width | None = None,
        thinking: bool | None = None,
        reuse: bool = True,
    ) -> Iterator[Event]:
        """Answer, event by event; the last one is ``Done``.

        Leaving the iterator early stops the answer. Requests of other threads wait their turn.

        Args:
            messages: chat messages, one user text, or token ids.
            sampling: how tokens are chosen; greedy by default.
            block: rows of one verify; 1 or 0 is plain decoding. None follows what pays,
                with a seed the draft's own block.
            width: chooses the drafted count of each round, in place of ``block``.
            thinking: switches thinking on or off in templates that know it.
            reuse: start from what the caches share with this prompt.

        Raises:
            DflashError: the request cannot be honoured, or the engine broke off.
        """
        if isinstance(messages, Prompt):
            check_ids((*messages.ids, *messages.said), self.info.vocab_size)
            prompt = messages
        else:
            prompt = self.prompt(messages, thinking)
        settings = sampling or SamplingParams()
        if width is None:
            width = self._chosen_width(block, settings)
        return self._events(_Request(prompt, settings, width, reuse))

    def complete(
        self,
        messages: Sequence[Message] | Sequence[int] | str | Prompt,
        sampling: SamplingParams | None = None,
        *,
        block: int | None = None,
        width: Width | None = None,
        thinking: bool | None = None,
        reuse: bool = True,
    ) -> Reply:
        """Answer in one go; arguments as for ``stream``."""
        return reply_of(
            self.stream(
                messages, sampling, block=block, width=width, thinking=thinking, reuse=reuse
            )
        )

    def stop(self) -> None:
        """End the running answer after its current round; from any thread.

        An answer that was asked for and has not begun yet ends as soon as it begins.
        """
        with self._lock:
            if self._unfinished:
                self._unfinished[0].stop.set()

    def memory(self) -> MemoryFigures:
        """Bytes held; waits for a running answer."""
        return self._on_thread(lambda backend: backend.memory())

    def margin(self, ids: Sequence[int]) -> float:
        """Top-1 minus top-2 logit of the target after ``ids``: how near to a tie it was."""

        def ask(backend: Backend) -> float:
            self._feed(backend, [])
            backend.extend(ids)
            self._held = list(ids)
            return backend.margin()

        return self._on_thread(ask)

    def close(self) -> None:
        """Stop, give the memory back and end the thread. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request in self._unfinished:
                request.stop.set()
            self._inbox.put(None)
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the caller's side

    def _chosen_width(self, block: int | None, sampling: SamplingParams) -> Width:
        if block is None:
            # What pays depends on the clock, and drafted ids on the width: a seeded answer that
            # is to be the same again keeps to one width.
            if self.costs is None or sampling.repeatable:
                return FixedWidth(self.info.block_size - 1)
            rows = self.info.rows(sampling)
            if rows not in self._widths:
                costs = self.costs.of(rows)
                self._widths[rows] = TwoWidths(AutoWidth(costs), AutoWidth(costs))
            return self._widths[rows]
        # Beyond the trained block only trees go on; a path is drafted as long as it was trained.
        most = max(1, self.info.rows(SamplingParams(branching=sampling.branching)))
        if block < 0 or block > most:
            raise OptionError(
                f"A block of {block} rows is asked for, this pair takes {most} at most.",
                f"Give 0 (plain decoding) to {most}.",
            )
        return FixedWidth(max(0, block - 1))

    def _submit(self, item: _Request | _Call[Any]) -> None:
        with self._lock:
            if self._closed:
                raise EngineError("The engine is closed.", "Load it again.")
            if isinstance(item, _Request):
                self._unfinished.append(item)
            self._inbox.put(item)

    def _events(self, request: _Request) -> Iterator[Event]:
        self._submit(request)
        try:
            while True:
                item = request.events.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Done):
                    return
        finally:
            request.stop.set()
            request.finished.wait()

    def _on_thread(self, run: Callable[[Backend], _T]) -> _T:
        call = _Call(run)
        self._submit(call)
        return call.wait()

    # -- the engine's thread

    def _main(
        self,
        opener: Callable[[], Opened | tuple[Backend, ChatTokenizer]],
        opened: queue.SimpleQueue[Opened | BaseException],
    ) -> None:
        try:
            loaded = Opened(*opener())
        except BaseException as error:  # handed to the thread that asked for the load
            opened.put(_unopened(error))
            return
        backend, tokenizer, _ = loaded
        opened.put(loaded)
        while (item := self._inbox.get()) is not None:
            if isinstance(item, _Call):
                if not item.run(backend):
                    self._held = []
                continue
            try:
                self._answer(backend, tokenizer, item)
            except BaseException as error:
                self._held = []
                item.events.put(_explained(error))
            finally:
                with self._lock:
                    self._unfinished.popleft()
                item.finished.set()
        backend.close()

    def _feed(self, backend: Backend, prefix: list[int]) -> None:
        """Rewind to at most ``prefix`` and note what the caches then hold."""
        reached = backend.rewind(len(prefix))
        self._held = prefix[:reached]

    def _answer(self, backend: Backend, tokenizer: ChatTokenizer, request: _Request) -> None:
        prompt, sampling = request.prompt, request.sampling
        # What was learnt from other answers must not change one that is to be the same again.
        lookup = Lookup() if sampling.repeatable else self._lookup
        lookup.clear()
        ids = [*prompt.ids, *prompt.said]
        backend.configure(sampling)
        shared = _shared_prefix(self._held, ids) if request.reuse else 0
        self._feed(backend, ids[: min(shared, len(ids) - 1)])
        reader = ReplyText(
            tokenizer.decode,
            sampling.stop,
            tokenizer.tags,
            "think" if prompt.in_thinking else "answer",
        )
        if prompt.said:
            request.events.put(_replayed(reader, prompt.said))
        for event in generate(
            backend,
            ids,
            sampling,
            width=request.width,
            reader=reader,
            lookup=lookup if sampling.lookup and backend.info.block_size > 1 else None,
            stop_ids=frozenset((*backend.info.stop_ids, *tokenizer.stop_ids)),
            cancelled=request.stop.is_set,
        ):
            if isinstance(event, Done):
                self._held = [*ids, *event.tokens][: backend.position]
            request.events.put(event)


def _replayed(reader: ReplyText, said: Sequence[int]) -> Resumed:
    """Bring a reader to where a reply was cut off."""
    for token in said:
        reader.push(token, "plain")
    pieces = reader.pieces()
    return Resumed(
        text="".join(p.text for p in pieces if p.channel == "answer"),
        thinking="".join(p.text for p in pieces if p.channel == "think"),
    )


def _shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids two sequences share from the front."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _unopened(error: BaseException) -> BaseException:
    """What stopped a load, in one line: a library stumbles over odd files in ways of its own."""
    if not isinstance(error, Exception):
        return error
    return explained(
        error,
        when=" while loading",
        what="The model cannot be loaded",
        next_step="Pull it again; a folder of your own may hold a damaged config.json.",
    )


def _explained(error: BaseException) -> DflashError:
    return explained(error, when=" in mid-answer")
