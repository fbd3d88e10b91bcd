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


class History:
    """The ids in the target's cache, and what they do to scores.

    Only committed ids are counted. Those of an open block are added row by row while it is
    judged, so a refused draft leaves nothing to undo. The answer begins behind the last
    ``extend``: what lies before it is the prompt.

    Args:
        vocab_size: ids of the target.
        device: where scores live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ids: list[int] = []
        self._begin = 0
        self._sampling: SamplingParams | None = None
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = None
        """Occurrences in the prompt and in the answer; None until asked for."""

    def configure(self, sampling: SamplingParams) -> None:
        """Set the penalties."""
        self._sampling = sampling if sampling.penalised else None
        self._begin, self._counts = len(self._ids), None

    def rewind(self, position: int) -> None:
        """Forget every id from ``position`` on."""
        del self._ids[position:]
        self._begin, self._counts = len(self._ids), None

    def extend(self, ids: Sequence[int]) -> None:
        """Ids of the prompt."""
        self._ids.extend(ids)
        self._begin, self._counts = len(self._ids), None

    def commit(self, ids: Sequence[int]) -> None:
        """Ids of the answer."""
        self._ids.extend(ids)
        if self._counts is not None:
            self._counts[1].add_(self._count(ids))

    def adjust(self, scores: torch.Tensor, following: torch.Tensor | None = None) -> torch.Tensor:
        """Scores ``[rows, vocab]`` after the penalties; ``following`` as in ``penalised``."""
        if self._sampling is None:
            return scores
        if self._counts is None:
            prompt, answer = self._ids[: self._begin], self._ids[self._begin :]
            self._counts = (self._count(prompt), self._count(answer))
        return penalised(scores, self._sampling, *self._counts, following)

    def _count(self, ids: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(ids, dtype=torch.long, device=self._device)
        return torch.bincount(index, minlength=self._vocab_size).float()
