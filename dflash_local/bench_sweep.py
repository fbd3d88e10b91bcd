"""Auto against every fixed width, plain decoding included: does the width control find the best?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    figures, begin = [], 0
    for name, given in sets.items():
        end = begin + len(given)
        auto, *fixed = [
            _width(block, [[replies[at] for replies in answers[begin:end]] for answers in passes])
            for at, block in enumerate(blocks)
        ]
        figures.append(SetFigures(name, auto, tuple(fixed)))
        begin = end
    return SweepReport(setup, repeats, tuple(figures))


def _width(block: int | None, passes: list[list[Reply]]) -> WidthFigures:
    every = [reply for replies in passes for reply in replies]
    return WidthFigures(block, Spread.of([tok_s(replies) for replies in passes]), tau(every))
