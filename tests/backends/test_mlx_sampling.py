"""Lossless sampling on MLX: published vectors, and the distribution of what is emitted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx

from dflash_local.backends.mlx_backend import MlxBackend
from dflash_local.backends.mlx_choice import Drafted
from dflash_local.backends.mlx_load import open_pair
from dflash_local.backends.mlx_penalties import Penalties
from dflash_local.backends.mlx_sampling import (
    Sampler,
    count_accepted,
    draw,
    one_hot,
    probabilities,
    replacement,
)
from dflash_local.sampling import SamplingParams
from tests.support.driving import PROMPT, one_round, plain
from tests.support.kits import DATA, Options
from tests.support.tiny import loop_pair

GOLDEN: dict[str, Any] = json.loads((DATA / "rejection.json").read_text())
SIZE = 6
DRAWS = 20_000

Probabilities = npt.NDArray[np.float64]


def load(folder: Path) -> MlxBackend:
    backend = open_pair(*loop_pair(folder), Options(), lambda step: None)
    assert isinstance(backend, MlxBackend)
    return backend


@pytest.mark.parametrize("case", GOLDEN["sampling_probs"])
def test_probabilities_are_the_references(case: dict[str, Any]) -> None:
    sampling = SamplingParams(
        temperature=case["temperature"], top_p=case["top_p"], top_k=case["top_k"]
    )
    rows = probabilities(mx.array(case["logits"]), sampling)
    np.testing.assert_allclose(np.array(rows), case["probs"], atol=1e-5)


@pytest.mark.parametrize("case", GOLDEN["rejection"], ids=lambda case: case["note"][:24])
def test_rejection_is_the_references(case: dict[str, Any]) -> None:
    p = mx.array(case["target_probs"])
    q = mx.array(case["draft_probs"])
    if "draft_candidate_ids" in case:
        candidates = mx.array(case["draft_candidate_ids"])
        q = mx.put_along_axis(mx.zeros(p[:-1].shape), candidates, q, axis=-1)
    ids = mx.array(case["draft_tokens"])
    accepted = count_accepted(p, q, ids, mx.array(case["uniforms"]))
    assert accepted.tolist() == [case["accepted"]]
    np.testing.assert_allclose(
        np.array(replacement(p, q, accepted))[0], case["next_token_distribution"], atol=1e-5
    )


def test_min_p_keeps_what_is_likely_enough() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    rows = probabilities(logits, SamplingParams(temperature=1.0, min_p=0.4))
    np.testing.assert_allclose(np.array(rows), [[0.625, 0.375, 0, 0]], atol=1e-6)


class Process:
    """A known target: the logits of a position depend on the id before it."""

    def __init__(self, sampling: SamplingParams, seed: int = 0) -> None:
        noise = np.random.default_rng(seed)
        self.target = mx.array(noise.normal(size=(SIZE, SIZE)) * 1.5)
        self.good = self.target + mx.array(noise.normal(size=(SIZE, SIZE)) * 0.5)
        self.bad = mx.array(noise.normal(size=(SIZE, SIZE)) * 2.0)
        self.p = np.array(probabilities(self.target, sampling)).astype(np.float64)

    def exact(self, length: int) -> Probabilities:
        """Probability of every sequence of ids after id 0."""
        joint: Probabilities = self.p[0]
        for _ in range(length - 1):
            joint = joint[..., None] * self.p
        return joint


def emit(
    process: Process, make: Callable[[mx.array], Any], draft: mx.array, length: int, count: int = 2
) -> Counter[tuple[int, ...]]:
    """First ids of many answers, each by rounds of ``count`` drafted ids.

    Args:
        process: the target.
        make: a sampler from a random key.
        draft: the draft's logits after each id; its slots see the anchor only, as a block's do.
        length: ids to look at.
        count: ids drafted per round.
    """

    def answer(key: mx.array) -> mx.array:
        sampler, anchor, outcomes = make(key), mx.array([0]), []
        for _ in range(length):  # each round emits one id at least
            drafted: Drafted = sampler.draft(mx.repeat(draft[anchor], count, axis=0))
            block = mx.concatenate([anchor, drafted.ids])
            outcomes.append(sampler.judge(process.target[block], drafted))
            anchor = outcomes[-1][1:2]
        return mx.stack(outcomes)

    seen: Counter[tuple[int, ...]] = Counter()
    answers: Any = mx.vmap(answer)(mx.random.split(mx.random.key(11), DRAWS))
    for rounds in np.array(answers).tolist():
        ids: list[int] = []
        for accepted, following, *proposed in rounds:
            ids += [*proposed[:accepted], following]
        seen[tuple(ids[:length])] += 1
    return seen


def chi_square(seen: Counter[tuple[int, ...]], exact: Probabilities) -> tuple[float, int]:
    """The statistic, with rare sequences in one class, and its degrees of freedom."""
    total = sum(seen.values())
    pooled = [0.0, 0.0]
    statistic, classes = 0.0, 0
    for ids in np.ndindex(exact.shape):
        expected, found = float(exact[ids]) * total, seen[tuple(ids)]
        if expected == 0.0:
            assert found == 0, f"{ids} is impossible"
        elif expected < 8.0:
            pooled[0] += expected
            pooled[1] += found
        else:
            statistic += (found - expected) ** 2 / expected
            classes += 1
    if pooled[0] > 0:
        statistic += (pooled[1] - pooled[0]) ** 2 / pooled[0]
        classes += 1
    return statistic, classes - 1


def agrees(seen: Counter[tuple[int, ...]], exact: Probabilities) -> bool:
    """Whether the statistic lies below its 99.9 % point (Wilson and Hilferty's approximation)."""
    statistic, freedom = chi_square(seen, exact)
    if freedom == 0:
        return True
    cut = 2.0 / (9.0 * freedom)
    return bool(statistic < freedom * (1.0 - cut + 3.09 * cut**0.5) ** 3)


def sampler(sampling: SamplingParams, greedy_draft: bool = False) -> Callable[[mx.array], Sampler]:
    def make(key: mx.array) -> Sampler:
        made = Sampler(sampling, greedy_draft=greedy_draft)
        made._key = key
        return made

    return make


SETTINGS = {
    "cold": SamplingParams(temperature=0.3, seed=0),
    "warm": SamplingParams(temperature=1.0, seed=0),
    "hot": SamplingParams(temperature=1.5, seed=0),
    "top-k": SamplingParams(temperature=1.0, top_k=3, seed=0),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8, seed=0),
    "min-p": SamplingParams(temperature=1.2, min_p=0.1, seed=0),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize("greedy", [False, True])
def test_answers_follow_the_targets_distribution(setting: str, draft: str, greedy: bool) -> None:
    process = Process(SETTINGS[setting])
    seen = emit(process, sampler(SETTINGS[setting], greedy), getattr(process, draft), 3)
    assert agrees(seen, process.exact(3)), chi_square(seen, process.exact(3))


class ArgmaxAgainstSoftmax(Sampler):
    """Wrong: takes the best ids and claims to have drawn them."""

    def draft(self, logits: mx.array) -> Drafted:
        return Drafted(
            mx.argmax(logits, axis=-1).astype(mx.int32), probabilities(logits, self._sampling)
        )


class WithoutResidual(Sampler):
    """Wrong: replaces a refused id by one from the whole distribution."""

    def judge(self, logits: mx.array, drafted: Drafted | None) -> mx.array:
        assert drafted is not None
        assert drafted.q is not None
        p = probabilities(logits, self._sampling)
        uniforms = mx.random.uniform(shape=drafted.ids.shape, key=self._fresh_key())
        accepted = count_accepted(p, drafted.q, drafted.ids, uniforms)
        following = draw(mx.take(p, accepted, axis=0), self._fresh_key())
        return mx.concatenate([accepted, following, drafted.ids])


class SharedNumbers(Sampler):
    """Wrong: draft and replacement use the same random numbers."""

    def _fresh_key(self) -> mx.array:
        key: mx.array = self._key
        return key


@pytest.mark.parametrize("wrong", [ArgmaxAgainstSoftmax, WithoutResidual, SharedNumbers])
def test_the_test_finds_known_mistakes(wrong: type[Sampler]) -> None:
    sampling = SETTINGS["warm"]

    def make(key: mx.array) -> Sampler:
        made = wrong(sampling)
        made._key = key
        return made

    process = Process(sampling)
    assert not agrees(emit(process, make, process.good, 3), process.exact(3))


def test_rejection_accepts_more_than_comparing_samples() -> None:
    sampling = SETTINGS["warm"]
    process = Process(sampling)
    q = np.array(probabilities(process.good, sampling))
    assert np.minimum(process.p, q).sum(-1).mean() > (process.p * q).sum(-1).mean() + 0.1


def test_a_one_hot_row_is_the_greedy_draft() -> None:
    ids = mx.array([2, 0])
    np.testing.assert_array_equal(np.array(one_hot(ids, 3)), [[0, 0, 1], [1, 0, 0]])


def test_a_seed_repeats_the_text_and_cold_is_greedy(tmp_path: Path) -> None:
    backend = load(tmp_path)
    greedy = plain(backend, PROMPT, 30)

    def answer(count: int, **settings: Any) -> list[int]:
        backend.configure(SamplingParams(**settings))
        backend.rewind(0)
        backend.extend(PROMPT)
        ids = [backend.sample()]
        while len(ids) < 30:
            ids += one_round(backend, ids[-1], count).tokens
        return ids[:30]

    first = answer(3, temperature=1.0, seed=5)
    answer(2, temperature=0.7)
    assert answer(3, temperature=1.0, seed=5) == first
    assert answer(3, temperature=1.0, seed=6) != first
    assert answer(3, temperature=1e-4, seed=5) == greedy
    assert answer(3, temperature=1.0, top_p=1e-6, seed=5) == greedy
    assert answer(3, temperature=1.0, top_p=0.0) == greedy
    assert answer(0, temperature=1.0, top_k=1) == greedy


def test_penalties_count_what_stands_before_each_row() -> None:
    sampling = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, temperature=0.0
    )
    scores = mx.array([[1.0, -1.0, 3.0, 2.0]] * 3)
    rows = Penalties(sampling).apply(scores, [3], [1, 1], mx.array([2, 0, 2]))
    one = [-1.0 * 2 - 0.25 - 0.5 * 2]
    expected = [
        [1.0, *one, 1.5 - 0.25 - 0.5, 1.0],
        [0.5 - 0.25 - 0.5, *one, 1.5 - 0.25 - 0.5, 1.0],
        [0.5 - 0.25 - 0.5, *one, 1.5 - 0.25 - 1.0, 1.0],
    ]
    np.testing.assert_allclose(np.array(rows), expected, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.6},
        {"presence_penalty": 2.0, "frequency_penalty": 0.7},
    ],
)
def test_penalised_answers_are_those_of_plain_decoding(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    backend = load(tmp_path)
    free = plain(backend, PROMPT, 60)
    backend.configure(SamplingParams(**settings))
    answers = []
    for count in (0, 1, 3):
        backend.rewind(0)
        backend.extend(PROMPT[:3])
        backend.extend(PROMPT[3:])
        ids = [backend.sample()]
        while len(ids) < 60:
            ids += one_round(backend, ids[-1], count).tokens
        answers.append(ids[:60])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] != free
    assert len(set(answers[0])) > len(set(free))
    # A second prompt that begins like the first answer counts as a prompt.
    kept = backend.rewind(20)
    backend.extend([*PROMPT, *answers[0]][kept:30])
    assert (backend._answer_from, len(backend._ids)) == (30, 30)
