"""The contract of the seam; every backend passes the same tests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from dflash_local.backend import Backend, Coverage
from dflash_local.sampling import SamplingParams
from tests.support.driving import PROMPT, check_coverage, done, one_round, plain, run

Opener = Callable[..., Backend]


def test_a_fresh_backend_covers_nothing(backend: Backend) -> None:
    assert backend.position == 0
    assert backend.coverage == Coverage(0, 0, 0)
    assert backend.info.block_size == 4
    assert backend.info.vocab_size == 128


def test_extend_covers_target_and_draft(backend: Backend) -> None:
    backend.extend(PROMPT[:5])
    assert backend.position == 5
    check_coverage(backend)
    backend.extend(PROMPT[5:])
    assert backend.position == 8
    check_coverage(backend)


def test_sampling_needs_logits(backend: Backend) -> None:
    with pytest.raises(AssertionError):
        backend.sample()
    backend.extend(PROMPT)
    backend.sample()
    backend.rewind(4)
    with pytest.raises(AssertionError):
        backend.sample()


def test_a_split_prefill_gives_the_same_token(backend: Backend) -> None:
    backend.extend(PROMPT)
    whole = backend.sample()
    backend.rewind(0)
    for token in PROMPT:
        backend.extend((token,))
    assert backend.sample() == whole


def test_a_plain_round_drafts_nothing(backend: Backend) -> None:
    backend.extend(PROMPT)
    verdict = one_round(backend, backend.sample(), 0)
    assert (verdict.drafted, verdict.accepted) == ((), 0)
    assert verdict.tokens == (verdict.next,)


def test_verdict_tokens_are_the_targets_own(backend: Backend) -> None:
    truth = plain(backend, PROMPT, 40)
    backend.rewind(0)
    backend.extend(PROMPT)
    ids = [backend.sample()]
    seen = set()
    while len(ids) < 30:
        verdict = one_round(backend, ids[-1], 3)
        assert len(verdict.drafted) == 3
        assert verdict.drafted[: verdict.accepted] == verdict.tokens[:-1]
        if verdict.accepted < 3:
            assert verdict.drafted[verdict.accepted] != verdict.next
        ids.extend(verdict.tokens)
        seen.add(verdict.accepted)
    assert ids == truth[: len(ids)]
    assert len(seen) >= 3, "the pair must accept different numbers of ids"


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
def test_a_cut_block_leaves_the_state_of_a_fresh_prefill(backend: Backend, keep: int) -> None:
    backend.configure(SamplingParams(branching=False))  # of a tree only what is right can be kept
    backend.extend(PROMPT)
    pending = backend.sample()
    proposal = backend.propose(pending, 3)
    verdict = backend.verify(proposal)
    backend.commit(keep)
    rows = [pending, *verdict.drafted][:keep]
    check_coverage(backend)
    if backend.info.backend == "scripted":  # its draft follows a script, not the context
        return

    def continuation() -> list[tuple[tuple[int, ...], int, int]]:
        verdicts = [one_round(backend, 7, 3), one_round(backend, 9, 2)]
        return [(v.drafted, v.accepted, v.next) for v in verdicts]

    after = continuation()
    backend.rewind(0)
    backend.extend([*PROMPT, *rows])
    assert continuation() == after


def test_a_dropped_proposal_has_no_effect(backend: Backend) -> None:
    backend.extend(PROMPT)
    pending = backend.sample()
    before = backend.coverage
    for count in (3, 1, 2):
        backend.propose(pending, count)
    assert backend.coverage == before
    truth = plain(backend, PROMPT, 12)
    backend.rewind(0)
    backend.extend(PROMPT)
    backend.propose(pending, 2)
    assert one_round(backend, pending, 3).tokens == tuple(truth[1:])[: backend.position - 8]


def test_rewind_goes_back_with_both_caches(backend: Backend) -> None:
    truth = plain(backend, PROMPT, 20)
    for position in (14, 9, 3):
        reached = backend.rewind(position)
        assert reached <= position
        assert backend.position == reached
        check_coverage(backend)
        whole = [*PROMPT, *truth]
        backend.extend(whole[reached : len(PROMPT) + 12])
        assert backend.sample() == truth[12]


def test_rewind_never_goes_forward(backend: Backend) -> None:
    backend.extend(PROMPT)
    assert backend.rewind(100) <= len(PROMPT)


def test_drafting_comes_back_after_plain_rounds(backend: Backend) -> None:
    truth = plain(backend, PROMPT, 60)
    backend.rewind(0)
    backend.extend(PROMPT)
    ids = [backend.sample()]
    while len(ids) < 40:
        count = 0 if len(ids) % 20 < 12 else 3
        ids.extend(one_round(backend, ids[-1], count).tokens)
    assert ids == truth[: len(ids)]


def test_waiting_features_are_bounded(open_backend: Opener) -> None:
    backend = open_backend(context=700)
    backend.extend(PROMPT)
    pending = backend.sample()
    most = 0
    for _ in range(600):
        pending = one_round(backend, pending, 0).next
        most = max(most, backend.coverage.pending)
    assert most <= 600 if backend.info.backend == "scripted" else most <= 256


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_loop_gives_plain_ids_at_every_width(backend: Backend, count: int) -> None:
    truth = plain(backend, PROMPT, 60)
    for branching, lookup in product((False, True), repeat=2):
        end = done(run(backend, count=count, max_tokens=60, branching=branching, lookup=lookup))
        assert end.tokens == tuple(truth)


def test_the_block_shrinks_to_the_context(open_backend: Opener) -> None:
    backend = open_backend(context=32)
    truth = plain(backend, PROMPT, 25)
    end = done(run(backend, count=3, max_tokens=None))
    assert (end.reason, end.tokens) == ("context", tuple(truth))
    assert backend.position == 32
    check_coverage(backend)


def test_a_second_shorter_request_equals_a_fresh_one(open_backend: Opener) -> None:
    used, fresh = open_backend(), open_backend()
    run(used, (*PROMPT, *PROMPT, 5, 6, 7), max_tokens=50)
    assert done(run(used, PROMPT[:3])).tokens == done(run(fresh, PROMPT[:3])).tokens


def test_without_a_draft_everything_is_plain(open_backend: Opener) -> None:
    backend = open_backend(draft=False)
    assert backend.info.block_size == 1
    assert backend.info.draft is None
    end = done(run(backend, count=3, max_tokens=20))
    assert end.tokens == tuple(plain(backend, PROMPT, 20))
    assert end.stats.drafted == 0
    assert backend.coverage.draft == backend.coverage.pending == 0


def test_the_margin_is_a_gap(backend: Backend) -> None:
    backend.extend(PROMPT)
    assert backend.margin() > 0
