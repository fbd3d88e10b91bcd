"""The one speculative loop: draft, verify, accept, cut, commit. Plain decoding drafts nothing.

The loop knows token ids and text, never tensors, and owns nothing between calls. Between two
events the backend's state is whole, so a caller may stop reading at any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Protocol

from dflash_local.backend import Backend, Verdict
from dflash_local.errors import ContextFull, OptionError
from dflash_local.events import Done, Event, Origin, Piece, Prefill, Reason, Round, Text, Usage
from dflash_local.lookup import NOTHING, Found, Lookup
from dflash_local.sampling import SamplingParams
from dflash_local.stats import DraftStats
from dflash_local.width import Width

PREFILL_SLICE = 512


class Reader(Protocol):
    """Turns ids into text and watches for stop strings."""

    @property
    def thinking_tokens(self) -> int:
        """Ids read so far that belong to thinking."""
        ...

    def push(self, token: int, origin: Origin) -> bool:
        """Read one id; True when it completes a stop string."""
        ...

    def pieces(self) -> tuple[Piece, ...]:
        """Text released since the last call."""
        ...

    def flush(self) -> tuple[Piece, ...]:
        """Text still held back, at the end of the answer."""
        ...


class _Answer:
    """The ids emitted so far and the rules that end them."""

    def __init__(self, limit: int | None, stop_ids: frozenset[int], reader: Reader) -> None:
        self.tokens: list[int] = []
        self.reason: Reason | None = None
        self._limit = limit
        self._stop_ids = stop_ids
        self._reader = reader

    def room(self) -> int | None:
        """Ids that may still be emitted; None is no limit."""
        return None if self._limit is None else self._limit - len(self.tokens)

    def take(self, tokens: Sequence[int], origins: Sequence[Origin]) -> int:
        """Emit ids up to the first that ends the answer; return how many.

        A stop wins over the limit where both fall on one id.
        """
        for kept, (token, origin) in enumerate(zip(tokens, origins, strict=True), start=1):
            self.tokens.append(token)
            if token in self._stop_ids:
                self.reason = "stop"
            elif self._reader.push(token, origin):
                self.reason = "stop_string"
            elif self.room() == 0:
                self.reason = "length"
            if self.reason is not None:
                return kept
        return len(tokens)


def _origins(verdict: Verdict) -> tuple[Origin, ...]:
    """Where each id of a verdict comes from."""
    last: Origin = "plain"
    if verdict.drafted:
        branches = verdict.branches
        most = len(verdict.drafted) if branches is None else branches.depth
        last = "bonus" if verdict.accepted == most else "correction"
    accepted: list[Origin] = ["draft" for _ in range(verdict.accepted)]
    return (*accepted, last)


def generate(
    backend: Backend,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    width: Width,
    reader: Reader,
    lookup: Lookup | None = None,
    stop_ids: frozenset[int],
    cancelled: Callable[[], bool] = lambda: False,
    prefill_slice: int = PREFILL_SLICE,
) -> Iterator[Event]:
    """Answer ``prompt``, of which ``backend.position`` ids are in the caches already.

    The caller has rewound the backend to a prefix of ``prompt`` shorter than it, and configured
    its sampling. ``cancelled`` is asked between prefill slices and between rounds. ``lookup`` is
    empty; it is told every id and advises the drafts.

    Yields:
        ``Prefill``, then per round a ``Round`` and, where text came free, a ``Text``; ``Done``
        at the end.

    Raises:
        ContextFull: the prompt is longer than the context.
        OptionError: the prompt is empty.
    """
    started = perf_counter()
    info = backend.info
    total, reused, rows = len(prompt), backend.position, info.rows(sampling)
    if not total:
        raise OptionError("The prompt is empty.", "Give at least one token.")
    if total > info.context:
        raise ContextFull(
            f"The prompt has {total} tokens, the context holds {info.context}.",
            "Shorten it, leave out the oldest turns, or load with a larger context.",
        )
    answer = _Answer(sampling.max_tokens, stop_ids, reader)
    stats = DraftStats()
    prefill_ms = 0.0

    def done(reason: Reason) -> Done:
        summary = stats.summary()
        return Done(
            reason=reason,
            tokens=tuple(answer.tokens),
            usage=Usage(
                prompt_tokens=total,
                reused_tokens=reused,
                completion_tokens=len(answer.tokens),
                thinking_tokens=reader.thinking_tokens,
                prefill_ms=prefill_ms,
                decode_ms=summary.decode_ms,
            ),
            stats=summary,
        )

    def count(found: Found) -> int:
        """Ids to draft next: the wish, within the rows, the answer's limit and the context."""
        room, wish = answer.room(), width.next(backend.position, advised=bool(found.ids))
        most = min(rows, info.context - backend.position) - 1
        return max(0, min(wish, most, most if room is None else room))

    def tell(ids: Sequence[int]) -> None:
        if lookup is not None:
            lookup.extend(ids)

    yield Prefill(reused, total, reused)
    told = 0
    while backend.position < total:
        if cancelled():
            yield done("cancelled")
            return
        start = backend.position
        backend.extend(prompt[start : min(total, start + prefill_slice - start % prefill_slice)])
        # Behind it, as a device may work on the slice meanwhile.
        tell(prompt[told : backend.position])
        told = backend.position
        yield Prefill(backend.position, total, reused)

    answer.take((backend.sample(),), ("first",))
    tell(answer.tokens)
    prefill_ms = 1000.0 * (perf_counter() - started)
    round_: Round | None = None
    index, pieces = 0, reader.pieces()
    while True:
        if answer.reason is None and backend.position == info.context:
            answer.reason = "context"
        if answer.reason is None and cancelled():
            answer.reason = "cancelled"
        begun = perf_counter()
        # The next draft is submitted before anybody reads this round's events, so that a device
        # that works in the background drafts while text is shown.
        proposal = None
        if answer.reason is None:
            found = NOTHING if lookup is None else lookup.ahead(info.block_size - 1)
            proposal = backend.propose(answer.tokens[-1], count(found), found)
        else:
            pieces += reader.flush()
        wall_ms = 1000.0 * (perf_counter() - begun)
        if round_ is not None:
            yield round_
        if pieces:
            yield Text(index, pieces)
        if proposal is None:
            break
        begun = perf_counter()
        verdict = backend.verify(proposal)
        keep = answer.take(verdict.tokens, _origins(verdict))
        backend.commit(keep)
        tell(answer.tokens[-keep:])
        wall_ms += 1000.0 * (perf_counter() - begun)
        index += 1
        round_ = Round(
            index=index,
            drafted=len(verdict.drafted),
            accepted=verdict.accepted,
            tokens=tuple(answer.tokens[-keep:]),
            wall_ms=wall_ms,
            draft_ms=verdict.draft_ms,
            verify_ms=verdict.verify_ms,
            position=backend.position,
            parked=width.parked and not verdict.drafted,
            branches=verdict.branches,
            advised=bool(found.ids),
        )
        stats.add(round_)
        width.observe(round_)
        pieces = reader.pieces()
    assert answer.reason is not None
    yield done(answer.reason)
