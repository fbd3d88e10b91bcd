"""How ids are chosen: at one position, for a draft's slots, and when a block is judged.

Everything stays lazy; a verdict is one small integer array, so that a round waits once.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from dflash_local.sampling import DRAFT_WIDTH, SamplingParams, draw_seeds

from .mlx_probs import (
    Drafted,
    Lattice,
    best,
    best_columns,
    best_path,
    certain,
    distribution,
    inverse_cdf,
    leading_true,
    race,
    sampled_path,
    settle,
)


class Chooser(Protocol):
    """One way of choosing ids; leading axes as in ``mlx_probs``."""

    def pick(self, logits: mx.array) -> mx.array:
        """One id ``[..., 1]`` for target logits ``[..., 1, vocab]``."""
        ...

    def draft(self, logits: mx.array) -> Drafted:
        """Ids for a draft's independent slots, from its logits ``[..., count, vocab]``."""
        ...

    def path(self, lattice: Lattice) -> Drafted:
        """Ids for slots of which each depends on the one before."""
        ...

    def judge(self, logits: mx.array, drafted: Drafted | None) -> mx.array:
        """Int32 ``[..., 2]``, accepted and next, from target logits ``[..., count + 1, vocab]``."""
        ...


class Greedy:
    """The best id everywhere; a drafted id is accepted where it is the target's best."""

    def pick(self, logits: mx.array) -> mx.array:
        """The best id."""
        return best(logits)

    def draft(self, logits: mx.array) -> Drafted:
        """The best id of each slot."""
        return Drafted(best(logits))

    def path(self, lattice: Lattice) -> Drafted:
        """The best step each time."""
        return best_path(lattice)

    def judge(self, logits: mx.array, drafted: Drafted | None) -> mx.array:
        """Accept up to the first slot that differs; the target's best follows."""
        return _compared(best(logits), drafted)


class Stream:
    """Random numbers for one purpose."""

    def __init__(self, seed: int) -> None:
        self._key = mx.random.key(seed)

    def key(self) -> mx.array:
        """A key that was not used before."""
        self._key, fresh = mx.random.split(self._key)
        return fresh

    def uniforms(self, shape: tuple[int, ...]) -> mx.array:
        """Numbers in [0, 1)."""
        return mx.random.uniform(shape=shape, key=self.key())


class _Sampler:
    """Draws drafts and single ids; every purpose has random numbers of its own."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._draft_temperature = sampling.drafting_temperature
        self._for_draft, self._for_test, self._for_next = map(Stream, draw_seeds(sampling.seed))

    def draft(self, logits: mx.array) -> Drafted:
        """Ids drawn from the best of every slot, processed like the target's rows."""
        if self._draft_temperature == 0.0:
            return certain(best(logits))
        candidates = best_columns(logits, min(DRAFT_WIDTH, logits.shape[-1]))
        scores = mx.take_along_axis(logits, candidates, axis=-1)
        q = distribution(scores, self._sampling, self._draft_temperature)
        column = inverse_cdf(q, self._for_draft.uniforms(q.shape[:-1]))
        ids = mx.take_along_axis(candidates, column[..., None], axis=-1)[..., 0]
        return Drafted(ids, q, candidates)

    def path(self, lattice: Lattice) -> Drafted:
        """A path drawn step by step."""
        if self._draft_temperature == 0.0:
            return best_path(lattice)
        rows = distribution(lattice.scores, self._sampling, self._draft_temperature)
        uniforms = self._for_draft.uniforms(lattice.candidates.shape[:-1])
        return sampled_path(lattice, rows, uniforms)

    def pick(self, logits: mx.array) -> mx.array:
        """An id drawn from the target's row."""
        return race(self._target(logits), self._for_next.key())

    def _target(self, logits: mx.array) -> mx.array:
        return distribution(logits, self._sampling, self._sampling.temperature)


class Rejection(_Sampler):
    """Accepts a drafted id with min(1, p / q) and draws the rest of p after a refusal."""

    def judge(self, logits: mx.array, drafted: Drafted | None) -> mx.array:
        """The ids emitted are distributed as if drawn from the target alone."""
        probs = self._target(logits)
        if drafted is None:
            following = race(probs, self._for_next.key())
            return mx.concatenate([mx.zeros_like(following), following], axis=-1)
        uniforms = self._for_test.uniforms(drafted.ids.shape)
        accepted, weights = settle(probs, drafted, uniforms)
        following = race(weights, self._for_next.key())[..., None]
        return mx.concatenate([accepted, following], axis=-1)


class Compare(_Sampler):
    """Draws every row from the target and accepts while the draft agrees: as exact, accepts less.

    Kept so that the bench can show the difference.
    """

    def judge(self, logits: mx.array, drafted: Drafted | None) -> mx.array:
        """The longest prefix equal to the target's draws, then the draw behind it."""
        return _compared(race(self._target(logits), self._for_next.key()), drafted)


def chooser(sampling: SamplingParams) -> Chooser:
    """The way that ``sampling`` asks for, freshly seeded."""
    if sampling.greedy:
        return Greedy()
    return Compare(sampling) if sampling.acceptance == "compare" else Rejection(sampling)


def _compared(ids: mx.array, drafted: Drafted | None) -> mx.array:
    """Accepted and next, where the target's own ids ``[..., count + 1]`` decide."""
    if drafted is None:
        return mx.concatenate([mx.zeros_like(ids), ids], axis=-1)
    accepted = leading_true(drafted.ids == ids[..., :-1])
    return mx.concatenate([accepted, mx.take_along_axis(ids, accepted, axis=-1)], axis=-1)
