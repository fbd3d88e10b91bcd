"""Where the newest ids of a context stood before, and what followed them there.

Answers repeat: names, lists, code that is edited, a text that is summed up. What followed the same
ids earlier is likely to follow again, which a draft of few layers often does not see. So drafts
get it as advice, with the odds that were good so far for so long a match.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SHORTEST, _LONGEST = 2, 8
"""Ids that must agree, and beyond how many no more are compared."""
_TRIED = 32
"""Places that are compared, the latest first."""
_ODDS = (0.55, 0.68, 0.72, 0.76, 0.86, 0.87, 0.91)
"""How often the next id agreed too after 2, 3, ... 8 ids, measured with the demo target."""
_BELIEF = 16.0
"""Observations that those odds are worth."""
_TRUST = 0.75
"""What the odds count beside the draft's own opinion, which is worth something too: at 1 rounds
yield 1 to 2 % less, at 0.6 as well."""


@dataclass(frozen=True, slots=True)
class Found:
    """Advice for the ids after the newest one; empty where nothing was found."""

    ids: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()
    """What each of them counts against the draft's own opinion; above 0, below 1."""

    def within(self, vocab_size: int) -> Found:
        """As far as the ids are below ``vocab_size``: a draft may know fewer than its target."""
        for at, token in enumerate(self.ids):
            if token >= vocab_size:
                return Found(self.ids[:at], self.odds[:at])
        return self


NOTHING = Found()


class Lookup:
    """The ids of one context in order, and for each pair of neighbours where it stands.

    What it learns about the odds outlives a context. Looking costs some microseconds, whatever
    the length of the context.
    """

    def __init__(self) -> None:
        self._hits = [odds * _BELIEF for odds in _ODDS]
        self._tries = [_BELIEF] * len(_ODDS)
        self.clear()

    def clear(self) -> None:
        """Begin another context."""
        self._ids: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}
        """Of the second id of a pair."""
        self._match = 0
        """Ids that agreed when ``ahead`` was last asked."""
        self._advice: Sequence[int] = ()

    def extend(self, ids: Iterable[int]) -> None:
        """Take the next ids, and learn from them whether the last advice was good."""
        known, places = self._ids, self._places
        for token in ids:
            if self._advice:
                self._learn(token)
            if known:
                places.setdefault((known[-1], token), []).append(len(known))
            known.append(token)
        self._advice = ()

    def ahead(self, count: int) -> Found:
        """What may follow: ``count`` ids, or none where the newest ones are new together.

        A pattern that runs up to the end is taken to go on.
        """
        match, place = self._longest()
        if not match or count < 1:
            return NOTHING
        ids = self._ids[place + 1 : place + 1 + count]
        period = len(ids)
        while len(ids) < count:
            ids.append(ids[len(ids) - period])
        self._match, self._advice = match, ids
        return Found(tuple(ids), tuple(self._odds(match + step) for step in range(count)))

    def _longest(self) -> tuple[int, int]:
        """The longest match of the newest ids, the latest such, and where it ends."""
        ids, best, place = self._ids, 0, 0
        last = len(ids) - 1
        if last < _SHORTEST:
            return best, place
        tried = 0
        for end in reversed(self._places[ids[-2], ids[-1]]):
            if end == last:
                continue
            match = _SHORTEST
            while match < min(_LONGEST, end + 1) and ids[end - match] == ids[last - match]:
                match += 1
            if match > best:
                best, place = match, end
            tried += 1
            if best == _LONGEST or tried == _TRIED:
                break
        return best, place

    def _odds(self, match: int) -> float:
        index = _index(match)
        return _TRUST * self._hits[index] / self._tries[index]

    def _learn(self, token: int) -> None:
        index = _index(self._match)
        right = self._advice[0] == token
        self._tries[index] += 1.0
        self._hits[index] += right
        self._match += 1
        self._advice = self._advice[1:] if right else ()


def _index(match: int) -> int:
    """Where the odds after a match of so many ids stand."""
    return min(match, _LONGEST) - _SHORTEST
