"""Advice from the context: what it makes of a draft, and that it changes no id."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_local.events import Round
from dflash_local.lookup import Found
from dflash_local.sampling import SamplingParams
from tests.support.draft_files import selector_pair, speculators_pair, v2_pair
from tests.support.driving import PROMPT, done, one_round, plain, run
from tests.support.kits import Array, Kit, Options, all_kits
from tests.support.tiny import loop_pair

Advise = Callable[[Array, Found], Array]
KEPT = [*range(0, 128, 2), 127]
NEW = (3, 77, 41)
"""Ids that the tiny draft would hardly say, and that a draft of ``KEPT`` cannot say."""


def reduced_pair(folder: Path) -> tuple[Path, Path]:
    return speculators_pair(folder, kept=KEPT)


every_kit = pytest.mark.parametrize("kit", all_kits(), ids=lambda kit: kit.name)
every_draft = pytest.mark.parametrize(
    "make",
    [loop_pair, v2_pair, selector_pair, reduced_pair],
    ids=["v1", "v2", "selector", "reduced"],
)


def by_torch(scores: Array, found: Found) -> Array:
    import torch

    from dflash_local.backends.torch_advice import advise, pack, unpack

    asked = unpack(pack(9, found, len(scores), torch.device("cpu")))
    assert asked.anchor.tolist() == [9]
    return np.asarray(advise(torch.from_numpy(scores), asked.ids, asked.odds))


def by_mlx(scores: Array, found: Found) -> Array:
    import mlx.core as mx

    from dflash_local.backends.mlx_advice import Asked

    return np.asarray(Asked(mx.array([9]), found).advise(mx.array(scores)))


WAYS = [way for name, way in (("torch", by_torch), ("mlx", by_mlx)) if find_spec(name)]


def shares(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    result: Array = powers / powers.sum(-1, keepdims=True)
    return result


@pytest.mark.parametrize("advise", WAYS)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_both_opinions_are_mixed(advise: Advise, count: int) -> None:
    scores = np.random.default_rng(1).normal(size=(count, 20)).astype(np.float32) * 4
    found = Found((3, 0, 19), (0.5, 0.01, 0.9))
    expected = shares(scores)
    for slot, (token, odds) in enumerate(zip(found.ids, found.odds, strict=True)):
        if slot < count:
            expected[slot] *= 1.0 - odds
            expected[slot, token] += odds
    np.testing.assert_allclose(shares(advise(scores, found)), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("odds", [(0.5, 0.01, 0.9), (0.0, 0.0, 0.0), (1 - 1e-6, 0.3, 0.0)])
@pytest.mark.parametrize("width", [1, 4, 20])
def test_a_lattice_holds_the_same_mixture(odds: tuple[float, ...], width: int) -> None:
    torch = pytest.importorskip("torch")
    from dflash_local.backends.torch_advice import join, pack, unpack
    from dflash_local.backends.torch_tree import independent

    scores = np.random.default_rng(3).normal(size=(3, 20)).astype(np.float32) * 4
    advised = (3, 0, int(scores[2].argmax()))
    asked = unpack(pack(9, Found(advised, odds), 3, torch.device("cpu")))
    alone = shares(scores)
    said = torch.from_numpy(np.log(alone[range(3), advised]))[:, None]
    found = join(independent(torch.from_numpy(scores), width), said, asked)
    mixed = alone * (1.0 - np.array(odds, dtype=np.float32))[:, None]
    mixed[range(3), advised] += odds
    for slot in range(3):
        ids, steps = found.candidates[slot].tolist(), found.scores[slot, 0].exp().tolist()
        there = {token: step for token, step in zip(ids, steps, strict=True) if step > 0}
        assert set(there) == {*np.argsort(-alone[slot])[:width].tolist(), advised[slot]}
        for token, step in there.items():
            assert step == pytest.approx(float(mixed[slot, token]), rel=1e-3, abs=2e-6)


@pytest.mark.parametrize("advise", WAYS)
def test_no_advice_leaves_the_scores(advise: Advise) -> None:
    scores = np.random.default_rng(2).normal(size=(3, 20)).astype(np.float32)
    assert (advise(scores, Found()) == scores).all()


@every_kit
@every_draft
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(branching=False),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(repetition_penalty=1.1),
    ],
    ids=["tree", "path", "drawn", "penalised"],
)
def test_certain_advice_is_what_is_drafted(
    kit: Kit, make: Any, sampling: SamplingParams, tmp_path: Path
) -> None:
    target, draft = make(tmp_path)
    backend = kit.open(target, draft, Options())
    backend.configure(sampling)
    backend.extend(PROMPT)
    pending = backend.sample()
    proposal = backend.propose(pending, 3, Found(NEW, (1 - 1e-6,) * 3))
    verdict = backend.verify(proposal)
    assert sorted(verdict.drafted) == sorted(NEW)  # of a tree those that were right come first
    backend.commit(verdict.accepted + 1)
    # The next round knows nothing of it.
    assert one_round(backend, verdict.next, 3).drafted != NEW


@every_kit
@every_draft
def test_advice_changes_no_id(kit: Kit, make: Any, tmp_path: Path) -> None:
    target, draft = make(tmp_path)
    backend = kit.open(target, draft, Options())
    prompt = (*PROMPT, *PROMPT)
    truth = plain(backend, prompt, 90)
    for branching in (True, False):
        events = run(backend, prompt, max_tokens=90, branching=branching, lookup=True)
        assert list(done(events).tokens) == truth
        advised = {event.advised for event in events if isinstance(event, Round)}
        assert advised == {False, True}


@every_kit
def test_ids_beyond_the_vocabulary_are_no_advice(kit: Kit, tmp_path: Path) -> None:
    """A draft may know fewer ids than its target says."""
    backend = kit.open(*loop_pair(tmp_path), Options())
    backend.extend(PROMPT)
    pending = backend.sample()
    alone = backend.propose(pending, 3)
    expected = backend.verify(alone).drafted
    backend.commit(1)
    backend.rewind(0)
    backend.extend(PROMPT)
    found = Found((128, 5, 6), (0.99,) * 3)
    assert backend.verify(backend.propose(backend.sample(), 3, found)).drafted == expected
