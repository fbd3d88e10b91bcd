"""Advice is what followed the same ids before, from the longest and latest match."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.lookup import NOTHING, Found, Lookup

IDS = st.lists(st.integers(0, 3), max_size=60)


def looked(ids: list[int], count: int = 5) -> Found:
    lookup = Lookup()
    lookup.extend(ids)
    return lookup.ahead(count)


def longest_match(ids: list[int]) -> tuple[int, int]:
    """The same by trying every place: how many ids agree, at most 8, and the latest such end."""
    best, place = 0, 0
    for end in range(len(ids) - 1):
        match = 0
        while match < min(8, end + 1) and ids[end - match] == ids[-1 - match]:
            match += 1
        if match >= best:
            best, place = match, end
    return (best, place) if best >= 2 else (0, 0)


@given(IDS)
def test_the_ids_after_the_longest_and_latest_match(ids: list[int]) -> None:
    match, place = longest_match(ids)
    found = looked(ids)
    if not match:
        assert found == NOTHING
        return
    known = ids[place + 1 :]
    assert list(found.ids[: len(known)]) == known[:5]
    assert len(found.ids) == len(found.odds) == 5
    assert all(0.0 < odds < 1.0 for odds in found.odds)


def test_a_pattern_at_the_end_is_taken_to_go_on() -> None:
    assert looked([9, 1, 2, 3, 1, 2, 3, 1, 2], 7).ids == (3, 1, 2, 3, 1, 2, 3)


def test_longer_matches_promise_more() -> None:
    short, long = looked([5, 6, 7, 0, 6, 7]), looked([1, 2, 3, 4, 5, 6, 7, 0, 2, 3, 4, 5, 6, 7])
    assert long.odds[0] > short.odds[0]
    assert list(short.odds) == sorted(short.odds)


@pytest.mark.parametrize("ids", [[], [1], [1, 1], [1, 2, 3, 4], [1, 2, 1]])
def test_nothing_where_the_newest_ids_are_new_together(ids: list[int]) -> None:
    assert looked(ids) == NOTHING


def test_odds_follow_what_happened() -> None:
    always, never = Lookup(), Lookup()
    for lookup, follows in ((always, (3,)), (never, (1, 2, 3, 4, 5, 6))):
        draws = random.Random(0)
        for _ in range(60):
            lookup.extend((1, 2))
            lookup.ahead(1)
            lookup.extend((draws.choice(follows),))
            lookup.extend((draws.randrange(10, 1000),))
    (good,), (bad,) = looked_again(always).odds, looked_again(never).odds
    assert good > 0.6 > 0.3 > bad


def looked_again(lookup: Lookup) -> Found:
    lookup.clear()
    lookup.extend((1, 2, 7, 1, 2))
    return lookup.ahead(1)


def test_learning_stops_at_the_first_wrong_id_and_needs_advice() -> None:
    told, asked = Lookup(), Lookup()
    ids = [1, 2, 3, 4, 5, 1, 2]
    for lookup in (told, asked):
        lookup.extend(ids)
    asked.ahead(3)
    told.extend((9, 4, 5))
    asked.extend((9, 4, 5))
    assert looked_again(told).odds != looked_again(asked).odds
    one, same = Lookup(), Lookup()
    for lookup, follow in ((one, (9, 4, 5)), (same, (9, 8, 7))):
        lookup.extend(ids)
        lookup.ahead(3)
        lookup.extend(follow)
    assert looked_again(one).odds == looked_again(same).odds


def test_another_context_forgets_the_ids() -> None:
    lookup = Lookup()
    lookup.extend([1, 2, 3, 1, 2])
    lookup.clear()
    lookup.extend([1, 2])
    assert lookup.ahead(4) == NOTHING


@given(IDS, st.integers(1, 5))
def test_ids_that_a_draft_does_not_know_end_the_advice(ids: list[int], vocab_size: int) -> None:
    found = looked(ids)
    within = found.within(vocab_size)
    assert all(token < vocab_size for token in within.ids)
    assert within.ids == found.ids[: len(within.ids)]
    assert within.odds == found.odds[: len(within.ids)]
    assert len(within.ids) == len(found.ids) or found.ids[len(within.ids)] >= vocab_size
