"""What leaves the loop and the engine: frozen values of ints, floats, strings and tuples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_local.branches import Branches
from dflash_local.stats import StatsSummary

Origin = Literal["first", "draft", "correction", "bonus", "plain"]
Channel = Literal["think", "answer"]
Reason = Literal["stop", "stop_string", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One step of loading: ``done`` of ``total``, in the stage's unit (files, bytes, layers)."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Progress over the prompt, in tokens. ``reused`` of ``total`` were in the cache already."""

    done: int
    total: int
    reused: int


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and one verify, or one plain step where ``drafted`` is 0."""

    index: int
    """From 1, within the answer."""
    drafted: int
    """Ids that the draft really proposed."""
    accepted: int
    """Ids of those that the target accepted, before any cut by a stop or a limit."""
    tokens: tuple[int, ...]
    """Ids emitted, after the cut."""
    wall_ms: float
    """From the start of the round to its commit, without the time of whoever reads events."""
    draft_ms: float | None
    verify_ms: float | None
    position: int
    """Target positions in the cache after the round."""
    parked: bool = False
    """Nothing was drafted because drafting does not pay here at the moment."""
    branches: Branches | None = None
    """How the draft branched; None where each id followed the one before."""
    advised: bool = False
    """Whether the newest ids stood in the context before, so that the draft had advice."""

    @property
    def depth(self) -> int:
        """Most ids that could have been accepted."""
        return self.drafted if self.branches is None else self.branches.depth

    @property
    def ranks(self) -> tuple[int, ...]:
        """Which of the drafted ids were accepted, by the draft's order of likelihood, from 1."""
        if self.branches is None:
            return tuple(range(1, self.accepted + 1))
        return self.branches.ranks


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one origin and one channel."""

    text: str
    origin: Origin
    channel: Channel = "answer"


@dataclass(frozen=True, slots=True)
class Text:
    """Text released by a round; round 0 is the token that the prefill gave.

    A token that ends inside a character releases its text with a later one, under the origin of
    the token that completed it.
    """

    round: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The first event where a reply goes on: its text so far, read again from its ids.

    A half character or a half tag at the cut was shown as it was; what follows completes it, so
    this text takes the place of what was shown.
    """

    text: str
    thinking: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one answer."""

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    """Every emitted id, the ending one included."""
    thinking_tokens: int
    prefill_ms: float
    """From the start of the request to its first token."""
    decode_ms: float
    """Sum of ``wall_ms`` over the rounds."""


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer; always the last event of a stream that did not raise."""

    reason: Reason
    tokens: tuple[int, ...]
    """All emitted ids, in order."""
    usage: Usage
    stats: StatsSummary


Event = LoadProgress | Resumed | Prefill | Round | Text | Done
