"""Choosing tokens on the device: drafting from scores, accepting, correcting.

Everything that a round decides leaves as one integer tensor, so that the round waits once.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dflash_local.sampling import DRAFT_WIDTH, SamplingParams, draw_seeds

from .torch_probs import (
    Drafted,
    Lattice,
    best,
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
    """How tokens are chosen under one setting; leading axes as in ``torch_probs``."""

    def draft(self, scores: torch.Tensor) -> Drafted:
        """Ids for draft scores ``[..., count, vocab]`` of independent slots."""
        ...

    def path(self, lattice: Lattice) -> Drafted:
        """Ids for slots of which each depends on the one before."""
        ...

    def judge(self, scores: torch.Tensor, drafted: Drafted) -> torch.Tensor:
        """``[..., 2]``, accepted and next, for target scores ``[..., count + 1, vocab]``."""
        ...

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        """One id ``[..., 1]`` for target scores ``[..., 1, vocab]``."""
        ...


class GreedyChooser:
    """The best token everywhere: drafts are accepted while they equal the target's best."""

    def draft(self, scores: torch.Tensor) -> Drafted:
        """The best id per slot."""
        return Drafted(best(scores))

    def path(self, lattice: Lattice) -> Drafted:
        """The best step each time."""
        return best_path(lattice)

    def judge(self, scores: torch.Tensor, drafted: Drafted) -> torch.Tensor:
        """The longest equal prefix, then the target's best."""
        return _compared(best(scores), drafted.ids)

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        """The best id."""
        return best(scores)


class _Sampler:
    """Draws drafts and single tokens; every purpose has random numbers of its own."""

    def __init__(self, sampling: SamplingParams, device: torch.device) -> None:
        self._sampling = sampling
        self._draft_temperature = sampling.drafting_temperature
        seeds = draw_seeds(sampling.seed)
        self._for_draft, self._for_test, self._for_next = (
            torch.Generator(device).manual_seed(seed) for seed in seeds
        )

    def draft(self, scores: torch.Tensor) -> Drafted:
        """Ids drawn from the best of every slot, processed like the target's rows."""
        if self._draft_temperature == 0.0:
            return certain(best(scores))
        width = min(DRAFT_WIDTH, scores.shape[-1])
        scores, candidates = scores.topk(width, dim=-1)
        q = distribution(scores, self._sampling, self._draft_temperature)
        column = inverse_cdf(q, _uniforms(q, self._for_draft))
        return Drafted(candidates.gather(-1, column[..., None])[..., 0], q, candidates)

    def path(self, lattice: Lattice) -> Drafted:
        """A path drawn step by step."""
        if self._draft_temperature == 0.0:
            return best_path(lattice)
        rows = distribution(lattice.scores, self._sampling, self._draft_temperature)
        return sampled_path(lattice, rows, _uniforms(lattice.candidates, self._for_draft))

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        """An id drawn from the target's row."""
        return race(self._target(scores), self._for_next)

    def _target(self, scores: torch.Tensor) -> torch.Tensor:
        return distribution(scores, self._sampling, self._sampling.temperature)


class RejectionChooser(_Sampler):
    """Accepts a drafted id with min(1, p / q) and draws the rest of p after a refusal."""

    def judge(self, scores: torch.Tensor, drafted: Drafted) -> torch.Tensor:
        """The ids emitted are distributed as if drawn from the target alone."""
        probs = self._target(scores)
        if drafted.ids.shape[-1] == 0:
            following = race(probs, self._for_next)
            return torch.cat((torch.zeros_like(following), following), dim=-1)
        uniforms = _uniforms(scores[..., :-1, :], self._for_test)
        accepted, weights = settle(probs, drafted, uniforms)
        return torch.cat((accepted, race(weights, self._for_next)[..., None]), dim=-1)


class CompareChooser(_Sampler):
    """Draws every row from the target and accepts while the draft agrees: as exact, accepts less.

    Kept so that the bench can show the difference.
    """

    def judge(self, scores: torch.Tensor, drafted: Drafted) -> torch.Tensor:
        """The longest prefix equal to the target's draws, then the draw behind it."""
        return _compared(race(self._target(scores), self._for_next), drafted.ids)


def chooser(sampling: SamplingParams, device: torch.device) -> Chooser:
    """The chooser for these settings, freshly seeded."""
    if sampling.greedy:
        return GreedyChooser()
    if sampling.acceptance == "compare":
        return CompareChooser(sampling, device)
    return RejectionChooser(sampling, device)


def _compared(ids: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Accepted and next, where the target's own ids ``[..., count + 1]`` decide."""
    accepted = leading_true(drafted == ids[..., :-1])
    return torch.cat((accepted, ids.gather(-1, accepted)), dim=-1)


def _uniforms(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One number in [0, 1) per row."""
    return torch.rand(like.shape[:-1], generator=generator, device=like.device)
