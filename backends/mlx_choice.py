"""How ids are chosen: at one position, for a draft's slots, and when a block is judged.

Everything stays lazy; a verdict is one small integer array, so that a round waits once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from dflash_local.errors import OptionError
from dflash_local.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Drafted:
    """Ids of a draft's slots, ``[count]``."""

    ids: mx.array


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


def chooser(sampling: SamplingParams) -> Chooser:
    """The way that ``sampling`` asks for.

    Raises:
        OptionError: a field is set that cannot be honoured.
    """
    if not sampling.greedy:
        raise OptionError(
            "Sampling is not available on this backend.", "Leave the temperature at 0."
        )
    if sampling.penalised:
        raise OptionError(
            "Penalties are not available on this backend.", "Leave the penalties out."
        )
    return Greedy()
