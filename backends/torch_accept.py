"""Choosing tokens on the device: drafting from scores, accepting, correcting.

Everything that a round decides leaves as one integer tensor, so that the round waits once.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dflash_local.errors import OptionError
from dflash_local.sampling import SamplingParams


class Chooser(Protocol):
    """How tokens are chosen under one setting."""

    def draft(self, scores: torch.Tensor) -> torch.Tensor:
        """Ids ``[count]`` for draft scores ``[count, vocab]``; remembers what judging needs."""
        ...

    def judge(self, scores: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """``[accepted, next]`` for target scores ``[count + 1, vocab]`` and drafted ids."""
        ...

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        """One id ``[1]`` for target scores ``[1, vocab]``."""
        ...


class GreedyChooser:
    """The best token everywhere: drafts are accepted while they equal the target's best."""

    def draft(self, scores: torch.Tensor) -> torch.Tensor:
        """The best id per slot."""
        return best(scores)

    def judge(self, scores: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """The longest equal prefix, then the target's best."""
        ids = best(scores)
        accepted = leading_true(drafted == ids[:-1])
        return torch.cat((accepted, ids.gather(0, accepted)))

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        """The best id."""
        return best(scores)


def best(scores: torch.Tensor) -> torch.Tensor:
    """The best id per row. ``max`` is vectorised for bf16 on the CPU, ``argmax`` is not: 0.2
    against 1.2 ms for 8 rows of 49,152."""
    return scores.max(dim=-1).indices


def leading_true(flags: torch.Tensor) -> torch.Tensor:
    """How many flags from the front are true, ``[1]``, without leaving the device."""
    return flags.long().cumprod(dim=0).sum(dim=0, keepdim=True)


def chooser(sampling: SamplingParams, device: torch.device) -> Chooser:
    """The chooser for these settings, freshly seeded.

    Raises:
        OptionError: a setting cannot be honoured.
    """
    if not sampling.greedy or sampling.penalised:
        raise OptionError(
            "This backend is greedy so far.", "Leave temperature at 0 and the penalties out."
        )
    return GreedyChooser()
