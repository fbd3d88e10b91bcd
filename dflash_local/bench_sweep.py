"""Auto against every fixed width, plain decoding included: does the width control find the best?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dflash_local.bench import in_turn, tau, tok_s
from dflash_local.bench_setup import Setup, Spread
from dflash_local.bench_topics import Prompts
from dflash_local.engine import Engine, Reply


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

    @property
    def best(self) -> WidthFigures:
        """The fixed width with the highest median."""
        return max(self.fixed, key=lambda width: width.tok_s.median)

    @property
    def quotient(self) -> float:
        """Auto over the best fixed width. Choosing the best of noisy figures flatters it."""
        best = self.best.tok_s.median
        return self.auto.tok_s.median / best if best else 0.0

    @property
    def steady_quotient(self) -> float:
        """The same at the middle times of rounds."""
        best = max(width.steady_tok_s for width in self.fixed)
        return self.auto.steady_tok_s / best if best else 0.0


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found."""

    setup: Setup
    repeats: int
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
    """Answer every prompt in every width, greedily, from a cold cache, in turn.

    Raises:
        OptionError: the pair has no draft, or there is no prompt.
    """
    prompts = [prompt for given in sets.values() for prompt in given]
    setup = Setup.of(engine, prompts, max_tokens, thinking)
    blocks: list[int | None] = [None, 0, *range(2, engine.info.block_size + 1)]
    passes = in_turn(
        engine,
        [text for _, text in prompts],
        blocks,
        max_tokens=max_tokens,
        repeats=repeats,
        thinking=thinking,
        progress=progress,
    )
    middle = _middle_times([reply for texts in passes for replies in texts for reply in replies])
    figures, begin = [], 0
    for name, given in sets.items():
        end = begin + len(given)
        part = [answers[begin:end] for answers in passes]
        auto, *fixed = [
            _width(block, [[replies[at] for replies in answers] for answers in part], middle)
            for at, block in enumerate(blocks)
        ]
        figures.append(SetFigures(name, auto, tuple(fixed)))
        begin = end
    return SweepReport(setup, repeats, tuple(figures))


def _middle_times(replies: Sequence[Reply]) -> dict[int, float]:
    """Milliseconds of a round by the number of ids that it drafted."""
    times: dict[int, list[float]] = {}
    for reply in replies:
        for round_ in reply.rounds:
            times.setdefault(round_.drafted, []).append(round_.wall_ms)
    return {count: median(taken) for count, taken in times.items()}


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
