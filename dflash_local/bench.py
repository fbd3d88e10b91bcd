"""Plain against speculative decoding: one process, the same loop and caches, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_local.bench_prompts import prompts_hash
from dflash_local.engine import Engine, Reply
from dflash_local.errors import OptionError
from dflash_local.sampling import SamplingParams
from dflash_local.stats import PositionRate

_LOOP_TOKENS = 24
"""An answer whose last ids repeat a pattern for this long is called repetitive."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Decode speed over all prompts; prefill is apart."""

    tokens: int
    seconds: float

    @property
    def tok_s(self) -> float:
        """Tokens per second of decode time."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a speculative answer left the plain one."""

    prompt: int
    """Number of the prompt, from 0."""
    position: int
    """First differing id of the answer, from 0."""
    margin: float
    """Top-1 minus top-2 logit of the target there: near 0 is a tie that rounding decides."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What a bench found."""

    plain: Speed
    speculative: Speed
    tau: float
    draft_rate: float
    positions: tuple[PositionRate, ...]
    by_kind: tuple[tuple[str, float], ...]
    """Tau per kind of prompt."""
    differences: tuple[Difference, ...]
    repetitive: tuple[int, ...]
    """Prompts whose plain answer ends in a loop of the same ids, which flatters every draft."""
    prompt_count: int
    prompts: str
    """Hash of the prompts."""
    max_tokens: int
    block: int | None
    """Rows of one verify; None: the width followed what pays."""
    thinking: bool | None
    model: str
    draft: str
    backend: str
    device: str
    dtype: str
    quantization: str
    kernels: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]

    @property
    def ratio(self) -> float:
        """Speculative over plain speed."""
        return self.speculative.tok_s / self.plain.tok_s if self.plain.tok_s else 0.0

    @property
    def identical(self) -> bool:
        """Whether every answer has the ids of plain decoding."""
        return not self.differences


def run(
    engine: Engine,
    prompts: Sequence[tuple[str, str]],
    *,
    max_tokens: int = 128,
    block: int | None = None,
    thinking: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BenchReport:
    """Answer every prompt both ways, greedily, from a cold cache.

    Which way goes first changes from prompt to prompt, so that a machine that slows down or
    speeds up on the way favours neither.

    Raises:
        OptionError: the pair has no draft, or there is no prompt.
    """
    if engine.info.draft is None:
        raise OptionError("There is no draft to bench.", "Load a pair with one.")
    if block is not None and block < 2:
        raise OptionError("Plain decoding is benched in any case.", "Give --block 2 or more.")
    if not prompts:
        raise OptionError("There is no prompt to bench.", "Give --prompts 1 or more.")
    sampling = SamplingParams(max_tokens=max_tokens)
    warm_up = SamplingParams(max_tokens=min(16, max_tokens))

    def answer(prompt: str, rows: int | None, settings: SamplingParams) -> Reply:
        return engine.complete(prompt, settings, block=rows, thinking=thinking, reuse=False)

    for rows in (0, block):
        answer(prompts[0][1], rows, warm_up)
    pairs: list[tuple[Reply, Reply]] = []
    for index, (_, prompt) in enumerate(prompts):
        progress(index, len(prompts))
        order = (0, block) if index % 2 == 0 else (block, 0)
        replies = [answer(prompt, rows, sampling) for rows in order]
        pairs.append((replies[0], replies[1]) if order[0] == 0 else (replies[1], replies[0]))
    progress(len(prompts), len(prompts))
    differences = [
        Difference(index, position, engine.margin([*ids, *plain.tokens[:position]]))
        for index, (plain, drafted) in enumerate(pairs)
        if (position := first_difference(plain.tokens, drafted.tokens)) is not None
        for ids in [engine.prompt(prompts[index][1], thinking).ids]
    ]
    drafted = [reply for _, reply in pairs]
    kinds = list(dict.fromkeys(kind for kind, _ in prompts))
    info = engine.info
    return BenchReport(
        plain=_speed([reply for reply, _ in pairs]),
        speculative=_speed(drafted),
        tau=tau(drafted),
        draft_rate=sum(r.stats.accepted for r in drafted)
        / max(1, sum(r.stats.drafted for r in drafted)),
        positions=positions(drafted),
        by_kind=tuple(
            (kind, tau([d for d, (k, _) in zip(drafted, prompts, strict=True) if k == kind]))
            for kind in kinds
        ),
        differences=tuple(differences),
        repetitive=tuple(i for i, (plain, _) in enumerate(pairs) if repeats(plain.tokens)),
        prompt_count=len(prompts),
        prompts=prompts_hash(prompts),
        max_tokens=max_tokens,
        block=block,
        thinking=thinking,
        model=info.target,
        draft=info.draft or "",
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        quantization=info.quantization,
        kernels=info.kernels,
        versions=info.versions,
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two answers differ, None where they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def repeats(tokens: Sequence[int], length: int = _LOOP_TOKENS) -> bool:
    """Whether the last ``length`` ids repeat a pattern of at most a third of that."""
    tail = list(tokens[-length:])
    if len(tail) < length:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, length // 3 + 1))


def _speed(replies: Sequence[Reply]) -> Speed:
    return Speed(
        sum(reply.stats.tokens for reply in replies),
        sum(reply.stats.decode_ms for reply in replies) / 1000.0,
    )


def tau(replies: Sequence[Reply]) -> float:
    """Tokens per drafting round over several answers."""
    weighted = [(r.stats.tau, r.stats.rounds - r.stats.plain_rounds) for r in replies]
    rounds = sum(count for _, count in weighted)
    return sum(tau * count for tau, count in weighted) / rounds if rounds else 0.0


def positions(replies: Sequence[Reply]) -> tuple[PositionRate, ...]:
    """Acceptance per position over several answers."""
    depth = max((len(reply.stats.positions) for reply in replies), default=0)
    rates = [
        [r.stats.positions[index] for r in replies if len(r.stats.positions) > index]
        for index in range(depth)
    ]
    return tuple(
        PositionRate(index + 1, sum(p.accepted for p in at), sum(p.rounds for p in at))
        for index, at in enumerate(rates)
    )
