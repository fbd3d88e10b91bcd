"""Auto against every fixed width, plain decoding included: does the width control find the best?

The best of many noisy figures is one that was lucky. So one pass over all widths only says which
is the best, and auto is compared with that one when both answer again, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median

from dflash_local.bench import in_turn, tau, tok_s
from dflash_local.bench_setup import Setup, Spread
from dflash_local.bench_topics import Prompts
from dflash_local.costs import measured_counts
from dflash_local.engine import Engine
from dflash_local.reply import Reply
from dflash_local.sampling import SamplingParams

Answered = list[list[list[Reply]]]
"""Per pass and text the replies in the order of the widths."""


@dataclass(frozen=True, slots=True)
class WidthFigures:
    """One way to choose the width."""

    block: int | None
    """Rows of one verify; 0 is plain decoding, None follows what pays."""
    tok_s: Spread
    tau: float
    """Tokens per drafting round; 0 where nothing is drafted."""
    steady_tok_s: float
    """Tokens per second, had each round taken the middle time of all rounds that drafted as much:
    what others do on this machine meanwhile, hits every width alike."""


@dataclass(frozen=True, slots=True)
class SetFigures:
    """One set of prompts in every width."""

    name: str
    auto: WidthFigures
    fixed: tuple[WidthFigures, ...]
    again: tuple[WidthFigures, WidthFigures]
    """Auto and the best fixed width, answering once more."""

    @property
    def best(self) -> WidthFigures:
        """The fixed width that was best in the pass over all, and met auto again."""
        return next(width for width in self.fixed if width.block == self.again[1].block)

    @property
    def quotient(self) -> float:
        """Auto over the best fixed width, when both answered again."""
        auto, best = (width.tok_s.median for width in self.again)
        return auto / best if best else 0.0

    @property
    def steady_quotient(self) -> float:
        """The same at the middle times of rounds."""
        auto, best = (width.steady_tok_s for width in self.again)
        return auto / best if best else 0.0


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found."""

    setup: Setup
    repeats: int
    """Of the comparison with the best width; all of them are swept once."""
    sets: tuple[SetFigures, ...]


def run_sweep(
    engine: Engine,
    sets: Mapping[str, Prompts],
    *,
    max_tokens: int = 128,
    repeats: int = 1,
    thinking: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SweepReport:
    """Answer every prompt in every width, greedily, from a cold cache, in turn; then ``repeats``
    times more with auto and the width that was best for its set.

    Raises:
        OptionError: the pair has no draft, or there is no prompt.
    """
    prompts = [prompt for given in sets.values() for prompt in given]
    setup = Setup.of(engine, prompts, max_tokens, thinking)
    counts = measured_counts(engine.info.rows(SamplingParams()))
    blocks: list[int | None] = [None, 0, *(count + 1 for count in counts if count)]
    total = len(prompts) * (1 + repeats)
    done = 0

    def answered(given: Prompts, blocks: list[int | None], passes: int) -> Answered:
        nonlocal done
        before = done
        done += len(given) * passes
        return in_turn(
            engine,
            [text for _, text in given],
            blocks,
            max_tokens=max_tokens,
            repeats=passes,
            thinking=thinking,
            progress=lambda now, _: progress(before + now, total),
        )

    # All sets in one go: every call warms all of its widths up.
    (texts,) = answered(tuple(prompts), blocks, 1)
    left = iter(texts)
    swept = {name: [list(islice(left, len(given)))] for name, given in sets.items()}
    middle = _middle_times([[texts]])
    best = {}
    for name, replies in swept.items():
        _, *fixed = _figures(blocks, replies, middle)
        best[name] = max(fixed, key=lambda width: width.steady_tok_s).block
    again = {name: answered(given, [None, best[name]], repeats) for name, given in sets.items()}
    middle = _middle_times([[texts], *again.values()])
    figures = []
    for name, replies in swept.items():
        auto, *fixed = _figures(blocks, replies, middle)
        once, more = _figures([None, best[name]], again[name], middle)
        figures.append(SetFigures(name, auto, tuple(fixed), (once, more)))
    return SweepReport(setup, repeats, tuple(figures))


def _middle_times(every: Iterable[Answered]) -> dict[int, float]:
    """Milliseconds of a round by the number of ids that it drafted."""
    times: dict[int, list[float]] = {}
    for passes in every:
        for reply in chain.from_iterable(chain.from_iterable(passes)):
            for round_ in reply.rounds:
                times.setdefault(round_.drafted, []).append(round_.wall_ms)
    return {count: median(taken) for count, taken in times.items()}


def _figures(
    blocks: Sequence[int | None], answered: Answered, middle: Mapping[int, float]
) -> list[WidthFigures]:
    """What every width took for some prompts."""
    return [
        _width(block, [[replies[at] for replies in texts] for texts in answered], middle)
        for at, block in enumerate(blocks)
    ]


def _width(
    block: int | None, passes: list[list[Reply]], middle: Mapping[int, float]
) -> WidthFigures:
    every = [reply for replies in passes for reply in replies]
    rounds = [round_ for reply in every for round_ in reply.rounds]
    spent = sum(middle[round_.drafted] for round_ in rounds)
    tokens = sum(len(round_.tokens) for round_ in rounds)
    steady = 1000.0 * tokens / spent if spent else 0.0
    spread = Spread.of([tok_s(replies) for replies in passes])
    return WidthFigures(block, spread, tau(every), steady)
