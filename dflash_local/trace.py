"""Trace: which round said what in one answer, as it goes and as it is saved.

Saved, a round is a short string: its figures, then one letter and a length for every run of
characters of one origin, such as ``7.4.5:d12c3``; rounds are joined by semicolons. Text that the
model thought has no place in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dflash_local.events import Origin, Round, Text

_LETTERS: dict[Origin, str] = {
    "first": "f",
    "draft": "d",
    "correction": "c",
    "bonus": "b",
    "plain": "p",
}
_ORIGINS = {letter: origin for origin, letter in _LETTERS.items()}
_ROUND = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9}):((?:[fdcbp]\d{1,9})*)")
_RUN = re.compile(r"([fdcbp])(\d+)")

MOST_ROUNDS = 20_000
"""Of a saved answer that are told apart; text after them is plain."""
_MOST_LETTERS = 64 * MOST_ROUNDS
"""Of a saved trace that are read; a round takes about 20."""


@dataclass(slots=True)
class TracedRound:
    """One round; number 0, with nothing drafted, is the token that the prefill gave."""

    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    pieces: list[tuple[Origin, str]] = field(default_factory=list)
    """Text of the answer that it released."""


class Trace:
    """Rounds in order, numbered from 0; an answer that goes on is numbered on."""

    def __init__(self) -> None:
        self.rounds: list[TracedRound] = []
        self._base = 0

    def add(self, event: Round | Text) -> None:
        """Take in what a round did, or what it said."""
        if isinstance(event, Round):
            round_ = self._at(event.index)
            round_.drafted, round_.accepted = event.drafted, event.accepted
            round_.emitted = len(event.tokens)
            return
        for piece in event.pieces:
            if piece.channel == "answer":
                self._at(event.round).pieces.append((piece.origin, piece.text))

    def go_on(self) -> None:
        """The next events number their rounds from 0 again."""
        self._base = len(self.rounds)

    def encode(self) -> str:
        """The trace without its text."""
        return ";".join(
            f"{r.drafted}.{r.accepted}.{r.emitted}:"
            + "".join(f"{_LETTERS[origin]}{len(text)}" for origin, text in r.pieces)
            for r in self.rounds
        )

    @classmethod
    def decode(cls, saved: str, text: str) -> Trace:
        """The trace of an answer with its text; all of it plain where none was saved.

        Text beyond what the trace tells is plain too, and what is no trace counts as none. So are
        rounds beyond those that can be looked at one by one: the work has a bound.
        """
        trace, at = cls(), 0
        parts = saved[:_MOST_LETTERS].split(";", MOST_ROUNDS) if saved else []
        if len(parts) > MOST_ROUNDS or len(saved) > _MOST_LETTERS:
            parts.pop()
        for part in parts:
            match = _ROUND.fullmatch(part)
            if match is None:
                trace, at = cls(), 0
                break
            drafted, accepted, emitted = (int(match[n]) for n in (1, 2, 3))
            round_ = TracedRound(drafted, accepted, emitted)
            for letter, length in _RUN.findall(match[4]):
                said = text[at : at + int(length)]
                at += len(said)
                round_.pieces.append((_ORIGINS[letter], said))
            trace.rounds.append(round_)
        if at < len(text):
            trace.go_on()
            trace._at(0).pieces.append(("plain", text[at:]))
        trace.go_on()
        return trace

    def _at(self, number: int) -> TracedRound:
        while len(self.rounds) <= self._base + number:
            self.rounds.append(TracedRound())
        return self.rounds[self._base + number]
