"""Acceptance statistics; each number that the program shows is defined here, once.

* round: one draft and one verify; a plain step is a round with nothing drafted.
* tau: tokens emitted per round that drafted, bonus included, first token excluded.
* draft rate: accepted / really drafted.
* d_i: share of the rounds with at least i drafted in which i or more were accepted.
* full blocks: share of the rounds that drafted in which an id was accepted in every slot.
* tok/s: emitted tokens over decode time; prefill and its token are apart. While an answer is
  written, over the last two seconds.
* x: tok/s over the speed of plain decoding for this pair on this machine; est. until a race has
  measured it on a prompt of the user's.
* first token: time from the request to the first token, the prefill.
* ribbon: one cell per round, its height the tokens emitted, from 1 to the block size.
* alarm: tau below 1.3 over the last 40 rounds that drafted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

ROLLING_MS = 2000.0
ALARM_ROUNDS = 40
ALARM_TAU = 1.3


class RoundFigures(Protocol):
    """The part of a round event that the statistics read."""

    @property
    def drafted(self) -> int:
        """Ids proposed."""
        ...

    @property
    def accepted(self) -> int:
        """Ids accepted."""
        ...

    @property
    def depth(self) -> int:
        """Most ids that could have been accepted: fewer than drafted where the draft branched."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Which of the drafted ids were accepted, the likeliest being 1."""
        ...

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids emitted."""
        ...

    @property
    def wall_ms(self) -> float:
        """Duration."""
        ...

    @property
    def draft_ms(self) -> float | None:
        """Duration of the draft, if known."""
        ...

    @property
    def verify_ms(self) -> float | None:
        """Duration of the verify, if known."""
        ...


@dataclass(frozen=True, slots=True)
class PositionRate:
    """Acceptance at one position of the block, the first drafted id being position 1."""

    position: int
    accepted: int
    rounds: int
    """Rounds that drafted at least this many ids: the n beside the rate."""

    @property
    def rate(self) -> float:
        """``accepted / rounds``, 0 where nothing was drafted."""
        return self.accepted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class StatsSummary:
    """The figures of an answer, or of any run of rounds."""

    rounds: int = 0
    plain_rounds: int = 0
    """Rounds that drafted nothing."""
    tokens: int = 0
    """Ids emitted by rounds; the first token of an answer is not among them."""
    drafted: int = 0
    accepted: int = 0
    full_blocks: int = 0
    """Rounds in which an id was accepted in every slot."""
    tau: float = 0.0
    """0 where no round drafted."""
    tok_s: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float | None = None
    """Sum over the rounds; None where the device could not tell every part."""
    verify_ms: float | None = None
    positions: tuple[PositionRate, ...] = ()
    histogram: tuple[int, ...] = ()
    """``histogram[k]`` rounds emitted ``k`` tokens."""

    @property
    def draft_rate(self) -> float:
        """Accepted over really drafted, 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class DraftStats:
    """Adds up rounds; also keeps the last two seconds for the live rate."""

    def __init__(self) -> None:
        self._rounds = self._plain = self._tokens = self._plain_tokens = 0
        self._drafted = self._accepted = self._full = 0
        self._wall_ms = self._draft_ms = self._verify_ms = 0.0
        self._parts_known = True
        self._tried: list[int] = []
        self._hit: list[int] = []
        self._histogram: list[int] = []
        self._window: deque[tuple[int, float]] = deque()
        self._window_ms = 0.0
        self._recent_taus: deque[int] = deque(maxlen=ALARM_ROUNDS)

    def add(self, round_: RoundFigures) -> None:
        """Count one round."""
        emitted = len(round_.tokens)
        self._rounds += 1
        self._tokens += emitted
        self._wall_ms += round_.wall_ms
        if round_.draft_ms is None or round_.verify_ms is None:
            self._parts_known = False
        else:
            self._draft_ms += round_.draft_ms
            self._verify_ms += round_.verify_ms
        if round_.drafted:
            self._drafted += round_.drafted
            self._accepted += round_.accepted
            self._full += round_.accepted == round_.depth
            self._recent_taus.append(emitted)
        else:
            self._plain += 1
            self._plain_tokens += emitted
        _grow(self._tried, round_.depth)
        _grow(self._hit, round_.depth)
        for index in range(round_.depth):
            self._tried[index] += 1
            self._hit[index] += index < round_.accepted
        _grow(self._histogram, emitted + 1)
        self._histogram[emitted] += 1
        self._window.append((emitted, round_.wall_ms))
        self._window_ms += round_.wall_ms
        while len(self._window) > 1 and self._window_ms - self._window[0][1] >= ROLLING_MS:
            self._window_ms -= self._window.popleft()[1]

    def add_all(self, rounds: Iterable[RoundFigures]) -> None:
        """Count several rounds."""
        for round_ in rounds:
            self.add(round_)

    @property
    def rolling_tok_s(self) -> float:
        """Emitted tokens over decode time within the last two seconds of rounds."""
        tokens = sum(count for count, _ in self._window)
        return 1000.0 * tokens / self._window_ms if self._window_ms else 0.0

    @property
    def draft_not_helping(self) -> bool:
        """Tau below 1.3 over the last 40 drafted rounds."""
        taus = self._recent_taus
        return len(taus) == ALARM_ROUNDS and sum(taus) / len(taus) < ALARM_TAU

    def summary(self) -> StatsSummary:
        """The totals so far."""
        drafting = self._rounds - self._plain
        parts = self._parts_known and self._rounds > 0
        return StatsSummary(
            rounds=self._rounds,
            plain_rounds=self._plain,
            tokens=self._tokens,
            drafted=self._drafted,
            accepted=self._accepted,
            full_blocks=self._full,
            tau=(self._tokens - self._plain_tokens) / drafting if drafting else 0.0,
            tok_s=1000.0 * self._tokens / self._wall_ms if self._wall_ms else 0.0,
            decode_ms=self._wall_ms,
            draft_ms=self._draft_ms if parts else None,
            verify_ms=self._verify_ms if parts else None,
            positions=tuple(
                PositionRate(index + 1, hit, tried)
                for index, (hit, tried) in enumerate(zip(self._hit, self._tried, strict=True))
            ),
            histogram=tuple(self._histogram),
        )


def _grow(counts: list[int], size: int) -> None:
    """Pad ``counts`` with zeros up to ``size``."""
    counts.extend([0] * (size - len(counts)))
