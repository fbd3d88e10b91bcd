"""How ids are chosen: at one position, for a draft's slots, and when a block is judged.

Everything stays lazy; a verdict is one small integer array, so that a round waits once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Drafted:
    """Ids of a draft's slots, and how they were chosen."""

    ids: mx.array
    """``[count]``"""
    q: mx.array | None = None
    """The distributions ``[count, vocab]`` that they were drawn from; None for the best ids."""


class Chooser(Protocol):
    """One way of choosing ids."""

    def pick(self, logits: mx.array) -> mx.array:
        """One id ``[1]`` for target logits ``[1, vocab]``."""
        ...

    def draft(self, logits: mx.array) -> Drafted:
        """Ids for a draft's slots, from its logits ``[count, vocab]``."""
        ...

    def judge(self, logits: mx.array, drafted: Drafted | None) -> mx.array:
        """Int32 ``[accepted, next, drafted ids...]`` from target logits ``[count + 1, vocab]``."""
        ...


class Greedy:
    """The best id everywhere; a drafted id is accepted where it is the target's best."""

    def pick(self, logits: mx.array) -> mx.array:
        """The best id."""
        return mx.argmax(logits, axis=-1)

    def draft(self, logits: mx.array) -> Drafted:
        """The best id of each slot."""
        return Drafted(mx.argmax(logits, axis=-1).astype(mx.int32))

    def judge(self, logits: mx.array, drafted: Drafted | None) -> mx.array:
        """Accept up to the first slot that differs; the target's best follows."""
        best = mx.argmax(logits, axis=-1).astype(mx.int32)
        if drafted is None:
            return mx.concatenate([mx.zeros_like(best), best])
        right = (best[:-1] == drafted.ids).astype(mx.int32)
        accepted = mx.cumprod(right).sum(keepdims=True).astype(mx.int32)
        return mx.concatenate([accepted, mx.take(best, accepted), drafted.ids])
