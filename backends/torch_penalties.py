"""Penalties on ids that were seen before, position by position inside a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_local.sampling import SamplingParams


def penalised(
    scores: torch.Tensor,
    sampling: SamplingParams,
    prompt: torch.Tensor,
    answer: torch.Tensor,
    following: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores ``[..., rows, vocab]`` in fp32 after the penalties.

    Args:
        scores: the model's.
        sampling: the penalties' strengths.
        prompt: occurrences of every id in the prompt, ``[..., vocab]``.
        answer: occurrences in the answer so far, ``[..., vocab]``.
        following: ids behind that, ``[..., n]``; row j has the first j + 1 of them behind it.
    """
    scores = scores.float()
    rows, vocab = scores.shape[-2:]
    counts = answer[..., None, :vocab].expand(scores.shape)
    if following is not None:
        width = following.shape[-1]
        steps = torch.ones(rows, width, device=scores.device).tril()
        shape = (*scores.shape[:-1], width)
        index = following[..., None, :].expand(shape)
        counts = counts.scatter_add(-1, index, steps.expand(shape))
    if sampling.repetition_penalty != 1.0:
        strength = sampling.repetition_penalty
        seen = (counts + prompt[..., None, :vocab]) > 0
        weaker = torch.where(scores > 0, scores / strength, scores * strength)
        scores = torch.where(seen, weaker, scores)
    return scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


class TorchPenalties:
    """``Arithmetic`` of ``penalty_history`` for one vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def count(self, ids: Sequence[int]) -> torch.Tensor:
        """Occurrences of every id, ``[vocab]``."""
        counts = torch.zeros(self._vocab_size, device=self._device)
        index = torch.tensor(ids, dtype=torch.long, device=self._device)
        return counts.scatter_add_(0, index, torch.ones(index.shape, device=self._device))

    def add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The sum of two counts."""
        return left + right

    def penalise(
        self,
        scores: torch.Tensor,
        sampling: SamplingParams,
        prompt: torch.Tensor,
        answer: torch.Tensor,
        following: torch.Tensor | None,
    ) -> torch.Tensor:
        """As ``penalised``."""
        return penalised(scores, sampling, prompt, answer, following)
