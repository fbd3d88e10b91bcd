"""Penalties on ids that were seen before, position by position inside a block."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dflash_local.sampling import SamplingParams


def penalised(
    scores: mx.array,
    sampling: SamplingParams,
    prompt: mx.array,
    answer: mx.array,
    following: mx.array | None = None,
) -> mx.array:
    """Scores ``[..., rows, vocab]`` in fp32 after the penalties.

    Args:
        scores: the model's.
        sampling: the penalties' strengths.
        prompt: occurrences of every id in the prompt, ``[..., vocab]``.
        answer: occurrences in the answer so far, ``[..., vocab]``.
        following: ids behind that, ``[..., n]``, n being 0, 1 or the number of rows; row j has the
            first j + 1 of them behind it.
    """
    scores = scores.astype(mx.float32)
    vocab = scores.shape[-1]
    counts = answer[..., None, :vocab]
    if following is not None and following.shape[-1]:
        hits = following[..., None] == mx.arange(vocab)
        counts = counts + mx.cumsum(hits.astype(mx.float32), axis=-2)
    if sampling.repetition_penalty != 1.0:
        strength = sampling.repetition_penalty
        seen = (counts + prompt[..., None, :vocab]) > 0
        weaker = mx.where(scores > 0, scores / strength, scores * strength)
        scores = mx.where(seen, weaker, scores)
    return scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


class MlxPenalties:
    """``Arithmetic`` of ``penalty_history`` for one vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def count(self, ids: Sequence[int]) -> mx.array:
        """Occurrences of every id, ``[vocab]``."""
        counts = mx.zeros(self._vocab_size, dtype=mx.float32)
        return counts if not ids else counts.at[mx.array(list(ids))].add(1.0)

    def add(self, left: mx.array, right: mx.array) -> mx.array:
        """The sum of two counts."""
        return left + right

    def penalise(
        self,
        scores: mx.array,
        sampling: SamplingParams,
        prompt: mx.array,
        answer: mx.array,
        following: mx.array | None,
    ) -> mx.array:
        """As ``penalised``."""
        return penalised(scores, sampling, prompt, answer, following)
