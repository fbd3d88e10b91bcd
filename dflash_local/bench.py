"""Plain against speculative decoding: one process, the same loop and caches, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from dflash_local.backend import MemoryFigures
from dflash_local.bench_setup import Setup, Spread, peak_resident
from dflash_local.engine import Engine
from dflash_local.errors import OptionError
from dflash_local.events import Round
from dflash_local.reply import Reply
from dflash_local.sampling import SamplingParams
from dflash_local.stats import PositionRate

_LOOP_TOKENS = 24
"""An answer whose last ids repeat a pattern for this long is called repetitive."""

Pair = tuple[Reply, Reply]
"""The plain and the speculative answer to one prompt."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Decode speed over all prompts; prefill is apart."""

    tokens: int
    """Of one repeat."""
    tok_s: Spread
    """Over the repeats."""


@dataclass(frozen=True, slots=True)
class Split:
    """Where the time of a round goes, in milliseconds, on average."""

    round_ms: float
    draft_ms: float | None
    """None where the device cannot tell."""
    verify_ms: float | None

    @property
    def other_ms(self) -> float | None:
        """What is neither draft nor verify: commit, text, the loop itself."""
        if self.draft_ms is None or self.verify_ms is None:
            return None
        return self.round_ms - self.draft_ms - self.verify_ms


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
class KindFigures:
    """One kind of prompt."""

    kind: str
    tau: float
    plain: Speed
    speculative: Speed
    ratio: Spread


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What a bench found."""

    setup: Setup
    block: int | None
    """Rows of one verify; None: the width followed what pays."""
    branching: bool
    """Whether drafts were trees where they could be."""
    lookup: bool
    """Whether drafts had advice from what the context repeats."""
    repeats: int
    plain: Speed
    speculative: Speed
    ratio: Spread
    """Speculative over plain speed, repeat by repeat."""
    tau: float
    draft_rate: float
    positions: tuple[PositionRate, ...]
    kinds: tuple[KindFigures, ...]
    first_token_ms: Spread
    """Over all answers."""
    plain_split: Split
    split: Split | None
    """Of the rounds that drafted; None where none did."""
    memory: MemoryFigures
    process_peak: int
    """Most bytes of main memory that the process held."""
    widths: tuple[tuple[tuple[int, int], ...], ...]
    """Per prompt of the last repeat, runs of ``(drafted ids, rounds)`` in order."""
    differences: tuple[Difference, ...]
    repetitive: tuple[int, ...]
    """Prompts whose plain answer ends in a loop of the same ids, which flatters every draft."""

    @property
    def identical(self) -> bool:
        """Whether every answer has the ids of plain decoding."""
        return not self.differences

    @property
    def drafted_counts(self) -> tuple[tuple[int, int], ...]:
        """``(drafted ids, rounds)`` over the last repeat, by count."""
        rounds: dict[int, int] = {}
        for count, times in chain.from_iterable(self.widths):
            rounds[count] = rounds.get(count, 0) + times
        return tuple(sorted(rounds.items()))


def run(
    engine: Engine,
    prompts: Sequence[tuple[str, str]],
    *,
    max_tokens: int = 128,
    block: int | None = None,
    repeats: int = 1,
    thinking: bool | None = None,
    branching: bool = True,
    lookup: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BenchReport:
    """Answer every prompt both ways, greedily, from a cold cache, ``repeats`` times.

    Which way goes first changes from prompt to prompt, so that a machine that slows down or
    speeds up on the way favours neither.

    Raises:
        OptionError: the pair has no draft, there is no prompt, or an option is out of range.
    """
    setup = Setup.of(engine, prompts, max_tokens, thinking)
    if block is not None and block < 2:
        raise OptionError("Plain decoding is benched in any case.", "Give --block 2 or more.")
    if repeats < 1:
        raise OptionError(f"--repeats is {repeats}.", "Give 1 or more.")
    texts = [text for _, text in prompts]
    answers = in_turn(
        engine,
        texts,
        (0, block),
        max_tokens=max_tokens,
        repeats=repeats,
        thinking=thinking,
        branching=branching,
        lookup=lookup,
        progress=progress,
    )
    passes = [[(plain, drafted) for plain, drafted in replies] for replies in answers]
    drafted = [reply for pairs in passes for _, reply in pairs]
    kinds = list(dict.fromkeys(kind for kind, _ in prompts))
    numbers = {k: [i for i, (kind, _) in enumerate(prompts) if kind == k] for k in kinds}
    return BenchReport(
        setup=setup,
        block=block,
        branching=branching and engine.info.branching,
        lookup=lookup,
        repeats=repeats,
        plain=_speed(passes, 0),
        speculative=_speed(passes, 1),
        ratio=_ratio(passes),
        tau=tau(drafted),
        draft_rate=sum(r.stats.accepted for r in drafted)
        / max(1, sum(r.stats.drafted for r in drafted)),
        positions=positions(drafted),
        kinds=tuple(
            _kind(kind, [[pairs[i] for i in numbers[kind]] for pairs in passes]) for kind in kinds
        ),
        first_token_ms=Spread.of(
            [reply.usage.prefill_ms for pairs in passes for pair in pairs for reply in pair]
        ),
        plain_split=split(r for pairs in passes for plain, _ in pairs for r in plain.rounds)
        or Split(0.0, None, None),
        split=split(r for reply in drafted for r in reply.rounds if r.drafted),
        memory=engine.memory(),
        process_peak=peak_resident(),
        widths=tuple(_runs(reply.rounds) for _, reply in passes[-1]),
        differences=_differences(engine, texts, passes, thinking),
        repetitive=tuple(i for i, (plain, _) in enumerate(passes[0]) if loops(plain.tokens)),
    )


def in_turn(
    engine: Engine,
    texts: Sequence[str],
    blocks: Sequence[int | None],
    *,
    max_tokens: int,
    repeats: int,
    thinking: bool | None,
    branching: bool = True,
    lookup: bool = True,
    progress: Callable[[int, int], None],
) -> list[list[list[Reply]]]:
    """Answer each text once per pass and block, from a cold cache; every block is first in turn.

    Returns:
        Per pass and text the replies in the order of ``blocks``.
    """

    def answer(text: str, block: int | None, tokens: int) -> Reply:
        sampling = SamplingParams(max_tokens=tokens, branching=branching, lookup=lookup)
        return engine.complete(text, sampling, block=block, thinking=thinking, reuse=False)

    for block in blocks:  # a warm-up
        answer(texts[0], block, min(16, max_tokens))
    total = repeats * len(texts)
    passes: list[list[list[Reply]]] = []
    for number in range(repeats):
        passes.append([])
        for index, text in enumerate(texts):
            progress(number * len(texts) + index, total)
            order = [(number + index + step) % len(blocks) for step in range(len(blocks))]
            replies = {at: answer(text, blocks[at], max_tokens) for at in order}
            passes[-1].append([replies[at] for at in range(len(blocks))])
    progress(total, total)
    return passes


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two answers differ, None where they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def loops(tokens: Sequence[int], length: int = _LOOP_TOKENS) -> bool:
    """Whether the last ``length`` ids repeat a pattern of at most a third of that."""
    tail = list(tokens[-length:])
    if len(tail) < length:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, length // 3 + 1))


def tok_s(replies: Sequence[Reply]) -> float:
    """Tokens over decode time of several answers; prefill and its token are apart."""
    spent = sum(reply.stats.decode_ms for reply in replies) / 1000.0
    return sum(reply.stats.tokens for reply in replies) / spent if spent else 0.0


def tau(replies: Sequence[Reply]) -> float:
    """Tokens per drafting round over several answers."""
    weighted = [(r.stats.tau, r.stats.rounds - r.stats.plain_rounds) for r in replies]
    rounds = sum(count for _, count in weighted)
    return sum(tau * count for tau, count in weighted) / rounds if rounds else 0.0


def split(rounds: Iterable[Round]) -> Split | None:
    """The average of some rounds; None where there is none."""
    listed = list(rounds)
    if not listed:
        return None
    draft = [r.draft_ms for r in listed if r.draft_ms is not None]
    verify = [r.verify_ms for r in listed if r.verify_ms is not None]
    count = len(listed)
    return Split(
        sum(r.wall_ms for r in listed) / count,
        sum(draft) / count if len(draft) == count else None,
        sum(verify) / count if len(verify) == count else None,
    )


def _speed(passes: Sequence[Sequence[Pair]], side: int) -> Speed:
    replies = [[pair[side] for pair in pairs] for pairs in passes]
    tokens = sum(reply.stats.tokens for reply in replies[-1])
    return Speed(tokens, Spread.of([tok_s(given) for given in replies]))


def _ratio(passes: Sequence[Sequence[Pair]]) -> Spread:
    ratios = []
    for pairs in passes:
        plain, drafted = tok_s([p for p, _ in pairs]), tok_s([d for _, d in pairs])
        ratios.append(drafted / plain if plain else 0.0)
    return Spread.of(ratios)


def _kind(kind: str, passes: Sequence[Sequence[Pair]]) -> KindFigures:
    drafted = [reply for pairs in passes for _, reply in pairs]
    return KindFigures(kind, tau(drafted), _speed(passes, 0), _speed(passes, 1), _ratio(passes))


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


def _runs(rounds: Sequence[Round]) -> tuple[tuple[int, int], ...]:
    return tuple((count, len(list(run))) for count, run in groupby(r.drafted for r in rounds))


def _differences(
    engine: Engine,
    texts: Sequence[str],
    passes: Sequence[Sequence[Pair]],
    thinking: bool | None,
) -> tuple[Difference, ...]:
    """Each place once, however many repeats show it."""
    places: dict[tuple[int, int], list[int]] = {}
    for pairs in passes:
        for index, (plain, drafted) in enumerate(pairs):
            position = first_difference(plain.tokens, drafted.tokens)
            if position is not None:
                places[index, position] = list(plain.tokens[:position])
    return tuple(
        Difference(
            index,
            position,
            engine.margin([*engine.prompt(texts[index], thinking).ids, *before]),
        )
        for (index, position), before in sorted(places.items())
    )
