"""Sampled answers have the target's distribution, whatever drafts; known mistakes are caught.

Chi-square of the first three ids over 40,000 answers a case, seeded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_local.sampling import SamplingParams
from tests.support.kits import Array
from tests.support.sampling_kits import (
    ChooserProbe,
    DraftedArrays,
    Ids,
    LatticeArrays,
    SamplingKit,
    sampling_kits,
)
from tests.support.tiny_language import (
    Quality,
    draw_answers,
    exact,
    inverse_cdf,
    surprise,
    with_ids,
)

ANSWERS = 40_000
CHANCE, CAUGHT = 4.0, 8.0
"""A right sampler stays below the first, a wrong one is far above the second."""

every_kit = pytest.mark.parametrize("kit", sampling_kits(), ids=lambda kit: kit.name)
both_versions = pytest.mark.parametrize("version", [1, 2])

OPTIONS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "all filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.5},
    "penalty and filters": {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "top_p": 0.85},
    "compare": {"acceptance": "compare"},
}


def off(
    kit: SamplingKit,
    chooser: ChooserProbe,
    sampling: SamplingParams,
    quality: Quality,
    version: int,
) -> float:
    answers = draw_answers(kit, chooser, sampling, quality, version, ANSWERS)
    return surprise(answers, exact(sampling))


@every_kit
@both_versions
@pytest.mark.parametrize("quality", ["good", "bad"])
@pytest.mark.parametrize("drafting", ["greedy", "sampled"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_the_text_is_the_targets(
    kit: SamplingKit, version: int, quality: Quality, drafting: str, temperature: float
) -> None:
    sampling = SamplingParams(
        temperature=temperature,
        seed=round(10 * temperature) + version,
        draft_temperature=0.0 if drafting == "greedy" else None,
    )
    assert off(kit, kit.chooser(sampling), sampling, quality, version) < CHANCE


@every_kit
@both_versions
@pytest.mark.parametrize("drafting", [0.0, None, 0.6])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_text_is_the_targets_under(
    kit: SamplingKit, version: int, name: str, drafting: float | None
) -> None:
    sampling = replace(
        SamplingParams(temperature=1.0, seed=5, draft_temperature=drafting), **OPTIONS[name]
    )
    assert off(kit, kit.chooser(sampling), sampling, "good", version) < CHANCE


class _Wrong:
    """A chooser with one mistake; the rest is the backend's own."""

    def __init__(self, kit: SamplingKit, sampling: SamplingParams) -> None:
        self.kit, self.sampling = kit, sampling
        self.right = kit.chooser(sampling)
        self.rng = np.random.default_rng(3)

    def draft(self, scores: Array) -> DraftedArrays:
        return self.right.draft(scores)

    def path(self, lattice: LatticeArrays) -> DraftedArrays:
        return self.right.path(lattice)

    def pick(self, scores: Array) -> Ids:
        return self.right.pick(scores)

    def judge(self, scores: Array, drafted: DraftedArrays) -> tuple[Ids, Ids]:
        return self.right.judge(scores, drafted)

    def settled(
        self, scores: Array, drafted: DraftedArrays, uniforms: Array
    ) -> tuple[Array, Ids, Array]:
        probs = self.kit.distribution(scores, self.sampling)
        return probs, *self.kit.settle(probs, drafted, uniforms.astype(np.float32))

    def uniforms(self, shape: tuple[int, ...]) -> Array:
        return self.rng.random(shape, dtype=np.float32)


class BestAgainstSoftmax(_Wrong):
    """Drafts the best id and tests it as if it had been drawn."""

    def draft(self, scores: Array) -> DraftedArrays:
        drafted = self.right.draft(scores)
        return with_ids(drafted, drafted.q.argmax(-1))

    def path(self, lattice: LatticeArrays) -> DraftedArrays:
        drafted = self.right.path(lattice)
        return with_ids(drafted, drafted.q.argmax(-1))


class NoResidual(_Wrong):
    """Draws from p itself after a refusal."""

    def judge(self, scores: Array, drafted: DraftedArrays) -> tuple[Ids, Ids]:
        probs, accepted, _ = self.settled(scores, drafted, self.uniforms(drafted.ids.shape))
        rows = np.take_along_axis(probs, accepted[:, None, None], axis=1)[:, 0]
        return accepted, inverse_cdf(rows, self.uniforms(accepted.shape))


class DraftAndTestShare(_Wrong):
    """One random number draws an id and tests it."""

    def draft(self, scores: Array) -> DraftedArrays:
        drafted = self.right.draft(scores)
        self.shared = self.uniforms(drafted.ids.shape)
        return with_ids(drafted, inverse_cdf(drafted.q, self.shared))

    def judge(self, scores: Array, drafted: DraftedArrays) -> tuple[Ids, Ids]:
        _, accepted, weights = self.settled(scores, drafted, self.shared)
        weights = weights / weights.sum(-1, keepdims=True)
        return accepted, inverse_cdf(weights, self.uniforms(accepted.shape))


class DraftAndResidualShare(DraftAndTestShare):
    """One random number draws an id and, after its refusal, the next."""

    def judge(self, scores: Array, drafted: DraftedArrays) -> tuple[Ids, Ids]:
        fresh = self.uniforms(drafted.ids.shape)
        _, accepted, weights = self.settled(scores, drafted, fresh)
        weights = weights / weights.sum(-1, keepdims=True)
        padded = np.concatenate([self.shared, fresh[:, :1]], axis=1)
        again = np.take_along_axis(padded, accepted[:, None], axis=1)[:, 0]
        return accepted, inverse_cdf(weights, again)


class RowOfAnotherPredecessor(_Wrong):
    """Tests a path against the distributions after the best candidates."""

    def path(self, lattice: LatticeArrays) -> DraftedArrays:
        drafted = self.right.path(lattice)
        q = np.exp(lattice.scores[..., 0, :] / self.sampling.temperature)
        return DraftedArrays(drafted.ids, q / q.sum(-1, keepdims=True), drafted.candidates)


class FilterForgotten(_Wrong):
    """Filters the draft and not the target."""

    def judge(self, scores: Array, drafted: DraftedArrays) -> tuple[Ids, Ids]:
        loose = replace(self.sampling, top_k=0)
        probs = self.kit.distribution(scores, loose)
        accepted, weights = self.kit.settle(probs, drafted, self.uniforms(drafted.ids.shape))
        weights = weights / weights.sum(-1, keepdims=True)
        return accepted, inverse_cdf(weights, self.uniforms(accepted.shape))


@every_kit
@pytest.mark.parametrize(
    ("wrong", "version"),
    [
        (BestAgainstSoftmax, 1),
        (BestAgainstSoftmax, 2),
        (NoResidual, 1),
        (NoResidual, 2),
        (DraftAndTestShare, 1),
        (DraftAndResidualShare, 1),
        (RowOfAnotherPredecessor, 2),
        (FilterForgotten, 1),
    ],
)
def test_a_mistake_is_caught(kit: SamplingKit, wrong: type[_Wrong], version: int) -> None:
    sampling = SamplingParams(temperature=1.0, seed=1)
    if wrong is FilterForgotten:
        sampling = replace(sampling, top_k=3)
    assert off(kit, wrong(kit, sampling), sampling, "good", version) > CAUGHT


@every_kit
def test_the_mistakes_harness_is_right_without_one(kit: SamplingKit) -> None:
    sampling = SamplingParams(temperature=1.0, seed=1)
    for version in (1, 2):
        assert off(kit, _Wrong(kit, sampling), sampling, "good", version) < CHANCE


@every_kit
def test_rejection_accepts_more_than_comparing(kit: SamplingKit) -> None:
    rates = []
    for acceptance in ("rejection", "compare"):
        sampling = SamplingParams(temperature=1.0, seed=2, acceptance=acceptance)
        counter = _Counting(kit, sampling)
        draw_answers(kit, counter, sampling, "good", 1, ANSWERS)
        rates.append(counter.accepted / counter.tested)
    assert rates[0] > rates[1] + 0.05


class _Counting(_Wrong):
    accepted = tested = 0

    def judge(self, scores: Array, drafted: DraftedArrays) -> tuple[Ids, Ids]:
        accepted, following = super().judge(scores, drafted)
        self.accepted += int(accepted.sum())
        self.tested += len(accepted)
        return accepted, following


@every_kit
@pytest.mark.parametrize("limit", [{"top_p": 0.0}, {"top_k": 1}, {"temperature": 0.0}])
def test_no_choice_is_greedy(kit: SamplingKit, limit: dict[str, Any]) -> None:
    greedy = draw_answers(kit, kit.chooser(SamplingParams()), SamplingParams(), "good", 1, 1)
    sampling = replace(SamplingParams(temperature=1.0, seed=4), **limit)
    for version in (1, 2):
        answers = draw_answers(kit, kit.chooser(sampling), sampling, "good", version, 200)
        assert (answers == greedy).all()


@every_kit
@pytest.mark.parametrize("limit", [{"top_p": 1e-4}, {"temperature": 1e-4}, {"min_p": 1.0}])
def test_almost_no_choice_is_almost_greedy(kit: SamplingKit, limit: dict[str, Any]) -> None:
    greedy = draw_answers(kit, kit.chooser(SamplingParams()), SamplingParams(), "good", 1, 1)
    sampling = replace(SamplingParams(temperature=1.0, seed=4), **limit)
    assert not sampling.greedy
    for version in (1, 2):
        answers = draw_answers(kit, kit.chooser(sampling), sampling, "bad", version, 200)
        assert (answers == greedy).all()
