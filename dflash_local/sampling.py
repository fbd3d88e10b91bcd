"""How tokens are chosen and when an answer ends; checked where it is made."""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

from dflash_local.errors import OptionError

Acceptance = Literal["rejection", "compare"]

DRAFT_WIDTH = 64
"""Best ids of a slot that a draft is drawn from, on every backend; q is over these, so exactness
does not depend on it, and little that a draft does is as wide as the vocabulary."""

_COLDEST = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one answer.

    Raises:
        OptionError: a value is out of range.
    """

    temperature: float = 0.0
    """0 takes the target's best token at every position (greedy)."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this; 0 leaves only the best one."""
    top_k: int = 0
    """Only the k best tokens; 0 switches it off."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the best one."""
    seed: int | None = None
    """The same seed gives the same text on the same backend and machine; None draws one."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, where negative) the logits of tokens seen so far; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token of the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logit of every token of the answer so far."""
    draft_temperature: float | None = None
    """Temperature of the draft while the target samples; 0 drafts the best ids. It changes how
    many are accepted, never the distribution of the text. None is the target's own."""
    acceptance: Acceptance = "rejection"
    """How a sampled draft is tested; ``compare`` is as exact, accepts less, and is for benches."""
    branching: bool = True
    """Draft a tree of the likeliest continuations, where the backend can and tokens are the best
    ones; False drafts the best id of every slot. The text is the same."""
    lookup: bool = True
    """Advise drafts with what followed the same ids earlier in the context. The text, or where it
    is drawn its distribution, is the same."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings."""
    max_tokens: int | None = None
    """Most tokens in the answer; None is as many as the context holds."""

    def __post_init__(self) -> None:
        self._check_kinds()
        stop: object = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        checks = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("top_k", self.top_k, 0, math.inf),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 1e-3, 1e3),
            ("presence_penalty", self.presence_penalty, -100.0, 100.0),
            ("frequency_penalty", self.frequency_penalty, -100.0, 100.0),
            ("draft_temperature", self.draft_temperature or 0.0, 0.0, 100.0),
        )
        for name, value, low, high in checks:
            if not low <= value <= high:  # also false for NaN
                raise OptionError(f"{name} is {value}.", f"Give a number from {low:g} to {high:g}.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise OptionError(f"seed is {self.seed}.", "Give a whole number from 0 to 2**63 - 1.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise OptionError(f"max_tokens is {self.max_tokens}.", "Give 1 or more.")
        if self.acceptance not in get_args(Acceptance):
            raise OptionError(
                f"There is no acceptance {self.acceptance!r}.",
                f"Give {' or '.join(get_args(Acceptance))}.",
            )
        if not all(self.stop):
            raise OptionError("A stop string is empty.", "Leave it out.")

    def _check_kinds(self) -> None:
        """Numbers are numbers, counts are whole: Python would let anything through."""
        optional = ("seed", "max_tokens", "draft_temperature")
        for name in self.__slots__:
            value: object = getattr(self, name)
            if name == "stop":
                listed = value if isinstance(value, (tuple, list)) else (value,)
                if not all(isinstance(text, str) for text in listed):
                    raise OptionError(f"stop is {value!r}.", "Give strings.")
                continue
            if name in ("branching", "lookup"):
                if not isinstance(value, bool):
                    raise OptionError(f"{name} is {value!r}.", "Give True or False.")
                continue
            if name == "acceptance" or (value is None and name in optional):
                continue
            whole = name in ("top_k", "seed", "max_tokens")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                kind = "whole number" if whole else "number"
                raise OptionError(f"{name} is {value!r}.", f"Give a {kind}.")

    @property
    def greedy(self) -> bool:
        """Whether every token is the best one: temperature, top_p or top_k leave no choice.

        Below the coldest temperature scores leave the range of fp32 when they are divided by it.
        """
        return self.temperature < _COLDEST or self.top_p == 0.0 or self.top_k == 1

    @property
    def repeatable(self) -> bool:
        """Whether the same draws are asked for, as a seed does where tokens are drawn."""
        return self.seed is not None and not self.greedy

    @property
    def branches(self) -> bool:
        """Whether a draft may be a tree: what is right then depends on the row before alone."""
        return self.branching and self.greedy and not self.penalised

    @property
    def drafting_temperature(self) -> float:
        """Temperature that a draft is drawn with; 0 is its best ids."""
        if self.greedy:
            return 0.0
        asked = self.temperature if self.draft_temperature is None else self.draft_temperature
        return asked if asked >= _COLDEST else 0.0

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def draw_seeds(seed: int | None) -> tuple[int, int, int]:
    """Seeds of three independent streams of random numbers: drafting, testing, the next token.

    One stream for two of these purposes would tie a refusal to what was drafted, and the text
    would no longer be the target's. Equal seeds give equal streams; None draws them.
    """
    root = secrets.randbits(63) if seed is None else seed
    draft, test, following = (
        int.from_bytes(hashlib.sha256(f"{root} {purpose}".encode()).digest()[:7], "big")
        for purpose in ("draft", "test", "next")
    )
    return draft, test, following
