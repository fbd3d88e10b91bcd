"""How many ids to draft next: what a round costs here against what it is likely to yield."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dflash_local.costs import Costs
from dflash_local.stats import RoundFigures

_MEMORY = 0.985
"""How much of what was learnt about acceptance stays after a round that drafted."""
_FIRST = 0.6
"""Acceptance assumed of the first drafted id before anything is known."""
_BELIEF = 4.0
"""Tokens of rounds with an id that weigh as much as what is known of the ids before it."""
_PARK, _RETURN = 0.99, 1.01
"""Over plain decoding: what drafting must promise to go on, and to come back once parked.

Apart, as estimates waver: a park that comes and goes loses both ways.
"""
_PROBE_ROUNDS = 3
"""Rounds of a probe while parked; it goes on for as long as it beats plain decoding."""
_PROBE_SHARE = 0.005
"""Share of the time that probes may lose: the less drafting pays, the longer are the rests."""
_COST_STEP = 0.09
"""Share of a new round's time in the running costs of all widths: a deeper context slows all."""
_OWN_STEP, _TABLE_ROUNDS = 0.01, 30
"""The part that a width's own cost takes besides, in the long run, and the rounds that its
measured cost is worth at first.

Small, for neighbours differ by a few percent, and a width must not look cheap for being unused.
"""
_PLAIN_EVERY = 16
"""Drafting rounds between two plain steps, at least; without any, a plain step that was measured
too slow would never be found out."""


class Width(Protocol):
    """Chooses the drafted count of each round; the loop clips it to what fits."""

    @property
    def parked(self) -> bool:
        """Whether drafting rests because it does not pay here."""
        ...

    def next(self, position: int, *, advised: bool = False) -> int:
        """Ids to draft at this context depth; 0 is a plain step. ``advised`` is whether the newest
        ids stood in the context before."""
        ...

    def observe(self, round_: RoundFigures) -> None:
        """Learn from a finished round."""
        ...


@dataclass(frozen=True, slots=True)
class FixedWidth:
    """Always the same count; 0 is plain decoding."""

    count: int

    @property
    def parked(self) -> bool:
        """Never: a fixed width is somebody's wish."""
        return False

    def next(self, position: int, *, advised: bool = False) -> int:
        """The count, at any depth."""
        return self.count

    def observe(self, round_: RoundFigures) -> None:
        """Nothing to learn."""


class AutoWidth:
    """The count with the most expected tokens per millisecond, 0 included.

    The ids of a draft have an order, slot by slot on a path, likeliest first in a tree, and a round
    of k drafts the first k. What the k-th adds is learnt as a share of what those before it yield,
    from the rounds that drafted it, so narrow rounds in hard stretches of text do not spoil what is
    known of the far ids. What is not known of an id goes on as the ones before it fell, so that a
    draft that does well is tried further. Costs start from a measurement and follow the rounds as
    the context grows.

    When nothing beats a plain step, drafting is parked; now and then a few rounds probe it, the
    more seldom the more they lose.

    Args:
        costs: milliseconds per count.
    """

    def __init__(self, costs: Costs) -> None:
        self._cost = list(costs.ms)
        self._rounds = [0] * len(costs.ms)
        self._hits = [0.0] * (len(costs.ms) - 1)
        """How often each id was accepted."""
        self._others = [0.0] * (len(costs.ms) - 1)
        """Tokens that the same rounds yielded by the ids before it."""
        self._parked = False
        self._since_plain = 0
        self._rest = 0
        self._probe = (0, 0, 0.0)
        """Rounds, tokens and milliseconds of the running probe."""

    @property
    def parked(self) -> bool:
        """Whether drafting rests."""
        return self._parked

    def expected(self) -> list[float]:
        """Tokens that a round is likely to emit, by the number of drafted ids."""
        totals, gain, fall = [1.0], 1.0, _FIRST
        for hits, others in zip(self._hits, self._others, strict=True):
            share = (hits + _BELIEF * gain * fall / totals[-1]) / (others + _BELIEF)
            before, gain = gain, share * totals[-1]
            fall = min(1.0, gain / before)
            totals.append(totals[-1] + gain)
        return totals

    def next(self, position: int, *, advised: bool = False) -> int:
        """The best count; while parked 0, or now and then the best of the others."""
        speeds = [tokens / ms for tokens, ms in zip(self.expected(), self._cost, strict=True)]
        drafting = max(range(1, len(speeds)), key=speeds.__getitem__, default=0)
        if drafting == 0:
            return 0
        lead = speeds[drafting] / speeds[0]
        if lead > (_RETURN if self._parked else _PARK):
            self._parked = False
            self._since_plain += 1
            if self._since_plain > _PLAIN_EVERY + (lead - 1.0) / _PROBE_SHARE:
                return 0
            return drafting
        rounds, tokens, spent = self._probe
        if not self._parked:
            self._parked, self._rest = True, self._pause(lead)
        elif self._rest == 0 and rounds >= _PROBE_ROUNDS and tokens <= speeds[0] * spent:
            self._rest = self._pause(lead)
        if self._rest == 0:
            return drafting
        self._rest -= 1
        self._probe = (0, 0, 0.0)
        return 0

    @staticmethod
    def _pause(lead: float) -> int:
        """Plain rounds until the next probe."""
        return 1 + round(_PROBE_ROUNDS * (1.0 / lead - 1.0) / _PROBE_SHARE)

    def observe(self, round_: RoundFigures) -> None:
        """Count what each drafted id added, and move the width's cost towards the round's."""
        count, ranks = round_.drafted, round_.ranks
        if self._parked and count:
            rounds, tokens, spent = self._probe
            self._probe = (rounds + 1, tokens + len(round_.tokens), spent + round_.wall_ms)
        known = self._cost[count]
        # One stall of a busy machine says nothing about a width.
        change = min(max(round_.wall_ms / known, 0.5), 2.0) - 1.0
        self._rounds[count] += 1
        own = max(_OWN_STEP, 1.0 / (_TABLE_ROUNDS + self._rounds[count]))
        self._cost = [cost * (1.0 + _COST_STEP * change) for cost in self._cost]
        self._cost[count] = known * (1.0 + (_COST_STEP + own) * change)
        if not count:
            self._since_plain = 0
        for index in range(len(self._hits)) if count else ():
            self._hits[index] *= _MEMORY
            self._others[index] *= _MEMORY
            if index < count:
                self._hits[index] += index + 1 in ranks
                self._others[index] += 1 + sum(rank <= index for rank in ranks)


class TwoWidths:
    """One width for rounds with advice and one for those without: where the context repeats
    itself, far more ids are right.

    Args:
        alone: for rounds in which the draft stands alone.
        advised: for the others.
    """

    def __init__(self, alone: Width, advised: Width) -> None:
        self._alone, self._advised = alone, advised
        self._used = alone

    @property
    def parked(self) -> bool:
        """Whether drafting rests in rounds like the last one."""
        return self._used.parked

    def next(self, position: int, *, advised: bool = False) -> int:
        """The wish of the width for such rounds."""
        self._used = self._advised if advised else self._alone
        return self._used.next(position, advised=advised)

    def observe(self, round_: RoundFigures) -> None:
        """Taught to the width that was asked."""
        self._used.observe(round_)
