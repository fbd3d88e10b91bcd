"""Advice from the context, on its way into a draft's scores."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dflash_local.lookup import Found


@dataclass(frozen=True, slots=True)
class Asked:
    """What a draft is asked: the id that it goes on from, and advice for its slots."""

    anchor: mx.array
    """``[1]``."""
    found: Found
    """Advice; for fewer slots than are drafted, or more."""

    def advise(self, scores: mx.array) -> mx.array:
        """Scores ``[slots, vocab]`` after which the advised ids are as likely as the odds say, the
        others sharing what is left as before: the mixture of both opinions.
        """
        found = self.found.within(scores.shape[-1])
        slots = min(len(scores), len(found.ids))
        if slots == 0:
            return scores
        scores = scores.astype(mx.float32)
        at = mx.array(found.ids[:slots], dtype=mx.int32)[:, None]
        odds = mx.array(found.odds[:slots], dtype=mx.float32)[:, None]
        front = scores[:slots]
        whole = mx.logsumexp(front, axis=-1, keepdims=True)
        own = mx.take_along_axis(front, at, axis=-1)
        raised = mx.logaddexp(own, whole + mx.log(odds / (1.0 - odds)))
        front = mx.put_along_axis(front, at, raised, axis=-1)
        return mx.concatenate([front, scores[slots:]])
