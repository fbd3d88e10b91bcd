"""The definitions of stats.py on rounds small enough to count by hand."""

from __future__ import annotations

import pytest

from dflash_local.events import Round
from dflash_local.stats import DraftStats, PositionRate


def round_(drafted: int, accepted: int, emitted: int, wall_ms: float = 10.0) -> Round:
    return Round(1, drafted, accepted, tuple(range(emitted)), wall_ms, None, None, 0)


def test_tau_leaves_plain_rounds_out_and_counts_the_bonus() -> None:
    stats = DraftStats()
    stats.add_all([round_(3, 3, 4), round_(3, 0, 1), round_(0, 0, 1)])
    summary = stats.summary()
    assert summary.tau == pytest.approx(2.5)
    assert summary.plain_rounds == 1
    assert summary.full_blocks == 1
    assert summary.draft_rate == pytest.approx(0.5)
    assert summary.tok_s == pytest.approx(6 / 0.03)
    assert summary.histogram == (0, 2, 0, 0, 1)


def test_a_position_counts_only_rounds_that_drafted_it() -> None:
    stats = DraftStats()
    stats.add_all([round_(3, 2, 3), round_(1, 1, 2), round_(2, 0, 1)])
    assert stats.summary().positions == (
        PositionRate(1, 2, 3),
        PositionRate(2, 1, 2),
        PositionRate(3, 0, 1),
    )


def test_the_rolling_rate_forgets_what_is_older_than_two_seconds() -> None:
    stats = DraftStats()
    stats.add_all([round_(0, 0, 1, wall_ms=1000.0)] * 5)
    stats.add_all([round_(3, 3, 4, wall_ms=100.0)] * 20)
    assert stats.rolling_tok_s == pytest.approx(40.0)
    assert stats.summary().tok_s < 20.0


def test_alarm_needs_forty_poor_rounds() -> None:
    stats = DraftStats()
    stats.add_all([round_(7, 0, 1)] * 39)
    assert not stats.draft_not_helping
    stats.add(round_(7, 0, 1))
    assert stats.draft_not_helping
    stats.add_all([round_(7, 7, 8)] * 10)
    assert not stats.draft_not_helping


def test_empty_stats_divide_by_nothing() -> None:
    summary = DraftStats().summary()
    assert (summary.tau, summary.tok_s, summary.draft_rate) == (0.0, 0.0, 0.0)
