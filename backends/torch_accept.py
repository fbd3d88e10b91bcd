"""Choosing tokens on the device: drafting from scores, accepting, correcting.

Everything that a round decides leaves as one integer tensor, so that the round waits once.
"""

from __future__ import annotations

from typing import Protocol

import torch

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
        return scores.argmax(dim=-1)

    def judge(self, scores: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """The longest equal prefix, then the target's best."""
        best = scores.argmax(dim=-1)
        accepted = leading_true(drafted == best[:-1])
        return torch.cat((accepted, best.gather(0, accepted)))

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        """The best id."""
        return scores.argmax(dim=-1)


def leading_true(flags: torch.Tensor) -> torch.Tensor:
    """How many flags from the front are true, ``[1]``, without leaving the device."""
    return flags.long().cumprod(dim=0).sum(dim=0, keepdim=True)


def chooser(sampling: SamplingParams, device: torch.device) -> Chooser:
    """The chooser for these settings, freshly seeded."""
    return GreedyChooser()
