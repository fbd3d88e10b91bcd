"""Penalties on ids that were there before, position by position inside a block."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dflash_local.sampling import SamplingParams


class Penalties:
    """Changes scores by what came before them.

    Only the target's scores need it: a draft that proposes without is refused more often, and the
    answer stays the same.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty

    def apply(
        self,
        scores: mx.array,
        prompt: Sequence[int],
        answer: Sequence[int],
        block: mx.array | None = None,
    ) -> mx.array:
        """Scores ``[rows, vocab]`` in fp32.

        Args:
            scores: one row behind ``answer``, or one behind each id of ``block``.
            prompt: ids that only the repetition penalty counts.
            answer: ids of the answer so far.
            block: ids after ``answer``; a row sees those up to its own.
        """
        size = scores.shape[-1]
        counts = _counted(answer, size)[None]
        if block is not None:
            own = (mx.arange(size)[None] == block[:, None]).astype(mx.float32)
            counts = counts + mx.cumsum(own, axis=0)
        seen = (counts + _counted(prompt, size)[None]) > 0
        scores = scores.astype(mx.float32)
        weaker = mx.where(scores > 0, scores / self._repetition, scores * self._repetition)
        scores = mx.where(seen, weaker, scores)
        return scores - self._presence * (counts > 0) - self._frequency * counts


def _counted(ids: Sequence[int], size: int) -> mx.array:
    """How often each id occurs, ``[size]``."""
    counts = mx.zeros((size,))
    if not ids:
        return counts
    return counts.at[mx.array(list(ids), dtype=mx.int32)].add(1.0)
