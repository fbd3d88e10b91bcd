"""Sampled decoding on the bench's prompts: the ways of drafting and accepting, side by side.

Sampled texts differ from way to way, so nothing is compared id by id; that every way has the
target's distribution is what the statistical tests show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dflash_local.bench import tau, tok_s
from dflash_local.bench_setup import Setup
from dflash_local.engine import Engine
from dflash_local.errors import OptionError
from dflash_local.reply import Reply
from dflash_local.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class WayReport:
    """One way over all prompts."""

    name: str
    tau: float
    """Tokens per drafting round; 0 where nothing is drafted."""
    draft_rate: float
    tokens: int
    tok_s: float


@dataclass(frozen=True, slots=True)
class SampledReport:
    """What a sampled bench found."""

    setup: Setup
    ways: tuple[WayReport, ...]
    """Plain decoding first, then rejection sampling as it is by default."""
    sampling: SamplingParams
    block: int


def run_sampled(
    engine: Engine,
    prompts: Sequence[tuple[str, str]],
    sampling: SamplingParams,
    *,
    block: int | None = None,
    thinking: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SampledReport:
    """Answer every prompt in every way, from a cold cache; prompt i has seed ``seed + i``.

    Raises:
        OptionError: the settings leave nothing to sample, the pair has no draft, or there is no
            prompt.
    """
    if sampling.greedy:
        raise OptionError("These settings leave nothing to sample.", "Give --temperature above 0.")
    setup = Setup.of(engine, prompts, sampling.max_tokens or 0, thinking)
    # The same width for every way: what differs is then only how ids are chosen.
    block = engine.info.block_size if block is None else block
    best = replace(sampling, draft_temperature=0.0)
    ways: tuple[tuple[str, SamplingParams, int | None], ...] = (
        ("plain", sampling, 0),
        ("rejection", sampling, block),
        ("rejection, best ids drafted", best, block),
        ("compare", replace(sampling, acceptance="compare"), block),
        ("compare, best ids drafted", replace(best, acceptance="compare"), block),
    )
    replies: list[list[Reply]] = [[] for _ in ways]
    for _, settings, rows in ways[:2]:
        warm_up = replace(settings, max_tokens=min(16, settings.max_tokens or 16))
        engine.complete(prompts[0][1], warm_up, block=rows, thinking=thinking, reuse=False)
    for index, (_, prompt) in enumerate(prompts):
        progress(index, len(prompts))
        for step in range(len(ways)):  # each way is first once in a while
            at = (index + step) % len(ways)
            _, settings, rows = ways[at]
            seeded = replace(settings, seed=(sampling.seed or 0) + index)
            replies[at].append(
                engine.complete(prompt, seeded, block=rows, thinking=thinking, reuse=False)
            )
    progress(len(prompts), len(prompts))
    return SampledReport(
        setup=setup,
        ways=tuple(_way(name, given) for (name, _, _), given in zip(ways, replies, strict=True)),
        sampling=sampling,
        block=block,
    )


def _way(name: str, replies: Sequence[Reply]) -> WayReport:
    drafted = sum(reply.stats.drafted for reply in replies)
    return WayReport(
        name=name,
        tau=tau(replies),
        draft_rate=sum(reply.stats.accepted for reply in replies) / drafted if drafted else 0.0,
        tokens=sum(reply.stats.tokens for reply in replies),
        tok_s=tok_s(replies),
    )
