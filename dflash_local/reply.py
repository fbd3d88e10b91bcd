"""A whole answer, put together from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dflash_local.events import Done, Event, Piece, Reason, Round, Text, Usage
from dflash_local.stats import StatsSummary


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    text: str
    thinking: str
    tokens: tuple[int, ...]
    reason: Reason
    usage: Usage
    stats: StatsSummary
    rounds: tuple[Round, ...]


def reply_of(events: Iterable[Event]) -> Reply:
    """The whole answer that its events, ``Done`` at the end, make up."""
    pieces: list[Piece] = []
    rounds: list[Round] = []
    for event in events:
        if isinstance(event, Text):
            pieces.extend(event.pieces)
        elif isinstance(event, Round):
            rounds.append(event)
        elif isinstance(event, Done):
            done = event
    return Reply(
        text="".join(p.text for p in pieces if p.channel == "answer"),
        thinking="".join(p.text for p in pieces if p.channel == "think"),
        tokens=done.tokens,
        reason=done.reason,
        usage=done.usage,
        stats=done.stats,
        rounds=tuple(rounds),
    )
