"""How a pair fares as the context grows: rounds, acceptance, and what a second turn waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from dflash_local.bench import Split, split, tau, tok_s
from dflash_local.bench_prompts import OWN, PROMPTS
from dflash_local.bench_setup import Setup
from dflash_local.bench_topics import CHAT, MATHS, SUMMARISE
from dflash_local.engine import Engine
from dflash_local.errors import OptionError
from dflash_local.prompting import Message
from dflash_local.reply import Reply
from dflash_local.sampling import SamplingParams

_INTRODUCTION = "Here are notes from many conversations.\n\n"
_QUESTION = "\n\nChoose one of the notes above and answer it at length."
_FOLLOW_UP = "Now say the same in one sentence."


@dataclass(frozen=True, slots=True)
class DepthFigures:
    """One depth of context."""

    depth: int
    """Tokens of the prompt."""
    plain: Split
    """An average plain step."""
    drafted: Split | None
    """An average round that drafted; None where none did."""
    tau: float
    plain_tok_s: float
    speculative_tok_s: float
    first_token_ms: float
    """From a cold cache."""
    second_turn_cold_ms: float
    """To the first token of a second turn that is read from its beginning."""
    second_turn_warm_ms: float
    """The same with the first turn in the cache."""
    second_turn_fed: int
    """Tokens that the warm second turn had to read."""
    identical: bool
    """Whether drafting and the cache left the ids as they are."""

    @property
    def warm_share(self) -> float:
        """What a warm second turn waits, of the cold one's wait."""
        cold = self.second_turn_cold_ms
        return self.second_turn_warm_ms / cold if cold else 0.0


@dataclass(frozen=True, slots=True)
class DepthReport:
    """What a sweep over context depths found."""

    setup: Setup
    block: int | None
    depths: tuple[DepthFigures, ...]


def room_for(depths: Sequence[int], max_tokens: int) -> int:
    """Positions that the deepest prompt, its answer and a second turn need."""
    return max(depths) + 2 * max_tokens + 64


def run_depths(
    engine: Engine,
    depths: Sequence[int],
    *,
    max_tokens: int = 64,
    block: int | None = None,
    thinking: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DepthReport:
    """Answer one prompt per depth, plainly and drafted, then a second turn, warm and cold.

    Raises:
        OptionError: the pair has no draft, or the context has no room for a depth.
    """
    needed, context = room_for(depths, max_tokens), engine.info.context
    if needed > context:
        raise OptionError(
            f"A depth of {max(depths)} needs a context of {needed}, {context} are there.",
            "Give --context, smaller --depths, or fewer --max-tokens.",
        )
    prompts = [("depth", _filled(engine, depth, thinking)) for depth in depths]
    setup = Setup.of(engine, prompts, max_tokens, thinking)
    engine.complete("Hello.", SamplingParams(max_tokens=8), block=block)
    figures = []
    for index, (_, text) in enumerate(prompts):
        progress(index, len(prompts))
        figures.append(_depth(engine, text, max_tokens, block, thinking))
    progress(len(prompts), len(prompts))
    return DepthReport(setup, block, tuple(figures))


def _depth(
    engine: Engine, text: str, max_tokens: int, block: int | None, thinking: bool | None
) -> DepthFigures:
    messages: list[Message] = [{"role": "user", "content": text}]

    def answer(rows: int | None, reuse: bool) -> Reply:
        sampling = SamplingParams(max_tokens=max_tokens)
        return engine.complete(messages, sampling, block=rows, thinking=thinking, reuse=reuse)

    plain = answer(0, reuse=False)
    drafted = answer(block, reuse=False)
    messages += [
        {"role": "assistant", "content": drafted.text},
        {"role": "user", "content": _FOLLOW_UP},
    ]
    warm = answer(block, reuse=True)
    cold = answer(block, reuse=False)
    return DepthFigures(
        depth=plain.usage.prompt_tokens,
        plain=split(plain.rounds) or Split(0.0, None, None),
        drafted=split(r for r in drafted.rounds if r.drafted),
        tau=tau([drafted]),
        plain_tok_s=tok_s([plain]),
        speculative_tok_s=tok_s([drafted]),
        first_token_ms=drafted.usage.prefill_ms,
        second_turn_cold_ms=cold.usage.prefill_ms,
        second_turn_warm_ms=warm.usage.prefill_ms,
        second_turn_fed=warm.usage.prompt_tokens - warm.usage.reused_tokens,
        identical=plain.tokens == drafted.tokens and warm.tokens == cold.tokens,
    )


def _filled(engine: Engine, depth: int, thinking: bool | None) -> str:
    """A message that makes a prompt of at most ``depth`` tokens, and nearly that many."""

    def message(words: int) -> str:
        return _INTRODUCTION + " ".join(islice(cycle(_WORDS), words)) + _QUESTION

    def tokens(words: int) -> int:
        return len(engine.prompt(message(words), thinking).ids)

    if tokens(0) > depth:
        raise OptionError(
            f"A depth of {depth} is less than the question alone.", f"Give {tokens(0)} or more."
        )
    low, high = 0, depth  # a word is a token or more
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens(middle) <= depth else (low, middle - 1)
    return message(low)


_WORDS = " ".join(
    text for texts in (SUMMARISE, OWN, CHAT, PROMPTS, MATHS) for _, text in texts
).split()
