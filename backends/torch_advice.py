"""Advice from the context, on its way to the device and into a draft's scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_local.lookup import Found

from .torch_probs import Lattice

_UNITS = 1 << 20
"""Parts of 1 in which odds travel, so that one vector of whole numbers carries all of a round."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a draft is asked: the id that it goes on from, and advice for its slots."""

    anchor: torch.Tensor
    """``[1]``."""
    ids: torch.Tensor
    """``[slots]``; any id where the odds are 0."""
    odds: torch.Tensor
    """``[slots]``, 0 where there is no advice."""


def pack(anchor: int, found: Found, slots: int, device: torch.device) -> torch.Tensor:
    """A round's anchor and advice as one vector ``[1 + 2 * slots]``, one copy to the device."""
    ids, odds = found.ids[:slots], found.odds[:slots]
    pad = [0] * (slots - len(ids))
    parts = [anchor, *ids, *pad, *(round(odd * _UNITS) for odd in odds), *pad]
    return torch.tensor(parts, dtype=torch.long, device=device)


def slots_of(packed: torch.Tensor) -> int:
    """The slots that ``pack`` was given."""
    return len(packed) // 2


def unpack(packed: torch.Tensor) -> Asked:
    """What ``pack`` was given."""
    slots = slots_of(packed)
    return Asked(packed[:1], packed[1 : 1 + slots], packed[1 + slots :].float() / _UNITS)


def advise(scores: torch.Tensor, columns: torch.Tensor, odds: torch.Tensor) -> torch.Tensor:
    """Scores ``[slots, width]`` after which ``columns`` ``[slots]`` are as likely as the odds say,
    the others sharing what is left as before: the mixture of both opinions.
    """
    at = columns[:, None]
    whole = torch.logsumexp(scores.float(), dim=-1, keepdim=True)
    raised = torch.logaddexp(scores.gather(-1, at).float(), whole + torch.logit(odds)[:, None])
    return scores.scatter(-1, at, raised.to(scores.dtype))


Link = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From ids ``[slots, width]`` and their log probabilities ``[slots, 1, width]`` to those of the
steps between them, ``[slots, width, width]``."""


def join(lattice: Lattice, said: torch.Tensor, asked: Asked, link: Link | None = None) -> Lattice:
    """The same mixture for a lattice of independent slots, whose candidates are the likeliest ids
    alone: the advised one is a candidate more.

    ``said`` ``[slots, 1]`` is what the draft itself gives the advised ids, as log probabilities.
    With ``link`` each slot depends on the one before, as far as the draft itself goes.
    """
    advice = asked.ids[:, None]
    own = lattice.scores[:, 0].masked_fill(lattice.candidates == advice, float("-inf"))
    candidates = torch.cat((lattice.candidates, advice), dim=-1)
    steps = torch.cat((own, said), dim=-1)[:, None]
    steps = steps if link is None else link(candidates, steps)
    less = torch.log1p(-asked.odds)[:, None, None]
    raised = torch.logaddexp(steps[..., -1:] + less, asked.odds.log()[:, None, None])
    steps = torch.cat((steps[..., :-1] + less, raised), dim=-1)
    return Lattice(candidates, steps.expand(-1, steps.shape[-1], -1))
