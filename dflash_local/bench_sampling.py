"""Sampled decoding on the bench's prompts: the ways of drafting and accepting, side by side.

Sampled texts differ from way to way, so nothing is compared id by id; that every way has the
target's distribution is what the statistical tests show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dflash_local.bench import tau
from dflash_local.bench_prompts import prompts_hash
from dflash_local.engine import Engine, Reply
from dflash_local.errors import OptionError
from dflash_local.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class WayReport:
    """One way over all prompts."""

    name: str
    tau: float
    """Tokens per drafting round; 0 where nothing is drafted."""
    draft_rate: float
    tokens: int
    seconds: float

    @property
    def tok_s(self) -> float:
        """Tokens per second of decode time."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class SampledReport:
    """What a sampled bench found."""

    ways: tuple[WayReport, ...]
    """Plain decoding first, then rejection sampling as it is by default."""
    sampling: SamplingParams
    prompt_count: int
    prompts: str
    """Hash of the prompts."""
    block: int
    model: str
    draft: str
    backend: str
    device: str
    dtype: str
    quantization: str
    versions: tuple[tuple[str, str], ...]


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
    if engine.info.draft is None:
        raise OptionError("There is no draft to bench.", "Load a pair with one.")
    if not prompts:
        raise OptionError("There is no prompt to bench.", "Give --prompts 1 or more.")
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
    info = engine.info
    return SampledReport(
        ways=tuple(_way(name, given) for (name, _, _), given in zip(ways, replies, strict=True)),
        sampling=sampling,
        prompt_count=len(prompts),
        prompts=prompts_hash(prompts),
        block=block,
        model=info.target,
        draft=info.draft or "",
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        quantization=info.quantization,
        versions=info.versions,
    )


def _way(name: str, replies: Sequence[Reply]) -> WayReport:
    drafted = sum(reply.stats.drafted for reply in replies)
    return WayReport(
        name=name,
        tau=tau(replies),
        draft_rate=sum(reply.stats.accepted for reply in replies) / drafted if drafted else 0.0,
        tokens=sum(reply.stats.tokens for reply in replies),
        seconds=sum(reply.stats.decode_ms for reply in replies) / 1000.0,
    )
