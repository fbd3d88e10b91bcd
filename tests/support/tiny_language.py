"""A language of six ids whose exact distribution is known, and thousands of answers at once.

The next id depends on the last two. Target and drafts are tables; only a backend's choices run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dflash_local.sampling import SamplingParams
from tests.support.kits import Array
from tests.support.sampling_kits import (
    ChooserProbe,
    DraftedArrays,
    Ids,
    LatticeArrays,
    SamplingKit,
)

VOCAB = 6
COUNT = 2
"""Ids drafted per round."""
LENGTH = 3
"""Ids of an answer that are looked at."""
PROMPT = (3, 0, 1)
WIDTH = 4
"""Candidates of a slot of the version 2 draft."""

_rng = np.random.default_rng(20)
TARGET = _rng.normal(0.0, 1.6, (VOCAB, VOCAB, VOCAB)).astype(np.float32)
"""Scores of the next id after two."""

Probabilities = npt.NDArray[np.float64]
Quality = Literal["good", "bad"]


@dataclass(frozen=True, slots=True)
class Tables:
    """A draft's scores."""

    slots: Array
    """``[vocab, vocab, count, vocab]``: per last two ids, independent slots."""
    steps: Array
    """``[vocab, vocab]``: added by version 2 for a step from one id to another."""


def _tables(quality: Quality) -> Tables:
    rng = np.random.default_rng(7)
    if quality == "bad":  # likes what the target dislikes
        slots = np.stack([-0.7 * TARGET, rng.normal(0.0, 2.0, TARGET.shape)], axis=2)
        return Tables(slots.astype(np.float32), rng.normal(0, 2, (VOCAB, VOCAB)).astype(np.float32))
    first = np.exp(TARGET) / np.exp(TARGET).sum(-1, keepdims=True)
    second = np.log(np.einsum("abc,bcd->abd", first, first))
    slots = np.stack([TARGET, second], axis=2)
    slots = slots + rng.normal(0.0, 0.4, slots.shape)
    return Tables(slots.astype(np.float32), 0.5 * TARGET.mean(axis=0))


TABLES: dict[Quality, Tables] = {"good": _tables("good"), "bad": _tables("bad")}


def counts(ids: Ids, valid: Ids | None = None) -> Array:
    """Occurrences ``[answers, vocab]`` in ``[answers, n]``."""
    hot = np.eye(VOCAB, dtype=np.float32)[ids]
    weighed = hot if valid is None else hot * valid[..., None]
    return np.asarray(weighed.sum(axis=1), np.float32)


def draw_answers(
    kit: SamplingKit,
    chooser: ChooserProbe,
    sampling: SamplingParams,
    quality: Quality,
    version: int,
    answers: int,
) -> Ids:
    """The first three ids of many answers, ``[answers, 3]``, round by round."""
    tables = TABLES[quality]
    prompt = np.broadcast_to(counts(np.array([PROMPT])), (answers, VOCAB))
    known = np.zeros((answers, len(PROMPT) + LENGTH), np.int64)
    known[:, : len(PROMPT)] = PROMPT
    every = np.arange(answers)
    place = np.arange(known.shape[1])

    def penalised(scores: Array, length: Ids, following: Ids) -> Array:
        """``length`` known ids, of which the last is the first of ``following``."""
        if not sampling.penalised:
            return scores
        committed = (place >= len(PROMPT)) & (place < length[:, None] - 1)
        answer = counts(known, committed.astype(np.int64))
        return kit.penalised(scores, sampling, prompt, answer, following)

    first = np.broadcast_to(TARGET[PROMPT[-2], PROMPT[-1]], (answers, 1, VOCAB))
    if sampling.penalised:
        none = np.zeros((answers, 0), np.int64)
        first = kit.penalised(first, sampling, prompt, np.zeros_like(prompt), none)
    known[:, len(PROMPT)] = chooser.pick(first)[:, 0]
    length = np.full(answers, len(PROMPT) + 1)
    while (length < known.shape[1]).any():
        at = np.minimum(length, known.shape[1] - 1)
        before, anchor = known[every, at - 2], known[every, at - 1]
        scores = penalised(tables.slots[before, anchor], at, anchor[:, None])
        if version == 1:
            drafted = chooser.draft(scores)
        else:
            drafted = chooser.path(_lattice(scores, tables.steps, anchor))
        block = np.concatenate([before[:, None], anchor[:, None], drafted.ids], axis=1)
        rows = penalised(TARGET[block[:, :-1], block[:, 1:]], at, block[:, 1:])
        accepted, following = chooser.judge(rows, drafted)
        emitted = np.concatenate([drafted.ids, following[:, None]], axis=1)
        emitted[every, accepted] = following
        for index in range(COUNT + 1):
            live = (index <= accepted) & (length < known.shape[1])
            known[live, length[live]] = emitted[live, index]
            length = length + live
    return known[:, len(PROMPT) :]


def _lattice(scores: Array, steps: Array, anchor: Ids) -> LatticeArrays:
    candidates = np.argsort(-scores, axis=-1)[..., :WIDTH]
    unary = np.take_along_axis(scores, candidates, axis=-1)
    first = np.broadcast_to(anchor[:, None, None], (*candidates.shape[:1], 1, WIDTH))
    before = np.concatenate([first, candidates[:, :-1]], axis=1)
    pairs = steps[before[..., :, None], candidates[..., None, :]]
    return LatticeArrays(candidates, (unary[..., None, :] + pairs).astype(np.float32))


def exact(sampling: SamplingParams) -> Probabilities:
    """Probability of every answer, ``[vocab] * 3``, in float64, by another way of computing."""
    probs = np.zeros((VOCAB,) * LENGTH)
    for ids in np.ndindex(*probs.shape):
        probs[ids] = np.prod(
            [_row((*PROMPT, *ids[:index]), sampling)[ids[index]] for index in range(LENGTH)]
        )
    return probs


def _row(known: tuple[int, ...], sampling: SamplingParams) -> list[float]:
    """Probabilities after the ids so far."""
    scores = [float(score) for score in TARGET[known[-2], known[-1]]]
    answer = known[len(PROMPT) :]
    for token in set(known):
        strength = sampling.repetition_penalty
        scores[token] = scores[token] / strength if scores[token] > 0 else scores[token] * strength
    for token in set(answer):
        scores[token] -= sampling.presence_penalty
        scores[token] -= sampling.frequency_penalty * answer.count(token)
    order = sorted(range(VOCAB), key=lambda token: -scores[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = {t: np.exp((scores[t] - scores[order[0]]) / sampling.temperature) for t in order}
    total = sum(weights.values())
    mass, kept = 0.0, {}
    for token in order:
        if mass < sampling.top_p:
            kept[token] = weights[token] / total
        mass += weights[token] / total
    kept = {t: p for t, p in kept.items() if p >= sampling.min_p * kept[order[0]]}
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(VOCAB)]


def surprise(answers: Ids, probs: Probabilities) -> float:
    """How far the answers are from ``probs``: chi-square in standard deviations.

    Answers that are expected less than five times are one cell. Wilson and Hilferty's cube root
    makes the statistic normal: 4 comes by chance once in 30,000 tests.
    """
    seen = np.zeros(probs.shape)
    np.add.at(seen, tuple(answers.T), 1)
    if seen[probs == 0].any():
        return float("inf")
    expected = probs * len(answers)
    rare = expected < 5
    cells = [*zip(seen[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() > 0:
        cells.append((seen[rare].sum(), max(expected[rare].sum(), 1.0)))
    free = len(cells) - 1
    chi = sum((s - e) ** 2 / e for s, e in cells)
    spread = 2 / (9 * free)
    return float(((chi / free) ** (1 / 3) - (1 - spread)) / spread**0.5)


def inverse_cdf(probs: Array, uniforms: Array) -> Ids:
    """Columns of rows ``[..., width]`` reached by uniforms ``[...]``."""
    sums = probs.cumsum(axis=-1)
    reached = np.asarray((sums <= uniforms[..., None]).sum(-1), np.int64)
    return np.asarray(np.minimum(reached, probs.shape[-1] - 1), np.int64)


def with_ids(drafted: DraftedArrays, columns: Ids) -> DraftedArrays:
    """The same rows with other ids taken from them."""
    ids = np.take_along_axis(drafted.candidates, columns[..., None], axis=-1)[..., 0]
    return DraftedArrays(ids, drafted.q, drafted.candidates)
