"""How far a draft's slots are from what the target says there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .blocks import Batch
from .network import DraftNetwork
from .recipe import FitRecipe

_ROWS_AT_ONCE = 256
"""Rows whose scores over the ids of a step fit a CPU's cache."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One step's loss, and how often slots were right."""

    loss: torch.Tensor
    matches: torch.Tensor
    """Per slot, the share of blocks whose first slots up to it are all right, ``[slots]``."""

    @property
    def tau(self) -> float:
        """Tokens per round that these blocks would have given."""
        return 1.0 + float(self.matches.sum())


class SlotLoss:
    """Cross entropy over the ids that matter.

    The head is the dearest part of a step, so the softmax runs over the most frequent ids and a
    draw of the others, whose scores are raised as if all of them were there.

    Args:
        head: the target's output head, ``[vocab, hidden]``.
        ranked: the ids that the draft can say, the most frequent first.
        fit: the numbers.
    """

    def __init__(self, head: torch.Tensor, ranked: torch.Tensor, fit: FitRecipe) -> None:
        self._head, self._fit = head, fit
        ranked = ranked.to(head.device)
        whole = fit.loss_vocab >= len(ranked)
        frequent = len(ranked) if whole else fit.loss_vocab * 2 // 3
        self._frequent, self._rare = ranked[:frequent], ranked[frequent:]
        self._drawn = 0 if whole else fit.loss_vocab - frequent

    def __call__(
        self, network: DraftNetwork, states: torch.Tensor, batch: Batch, seed: int
    ) -> Outcome:
        """The loss of a batch whose final states are ``[sequences, blocks, rows, hidden]``."""
        fit, device = self._fit, states.device
        slots = states[:, :, 1:]
        valid = batch.best_probabilities[..., 0] > 0
        weights = torch.exp(-torch.arange(slots.shape[2], device=device) / fit.gamma)
        weights = weights.expand(valid.shape)[valid]
        subset, correction = self._subset(seed)
        place = torch.full((len(self._head),), -1, device=device)
        place[subset] = torch.arange(len(subset), device=device)
        rows, head = slots[valid], self._head[subset]
        best, mass = place[batch.best_ids[valid]], batch.best_probabilities[valid]
        known = best >= 0
        mass = mass * known
        shares = fit.soft * mass / mass.sum(-1, keepdim=True).clamp(min=1e-6)
        shares[:, 0] += 1 - fit.soft
        weights = weights * known[:, 0]
        best = best.masked_fill(~known, 0)
        selector = None if network.config.v2 is None else network.candidate_selector
        width = 1 if selector is None else min(selector.width, len(subset))
        each, values, places = _Nearness.apply(rows, head, correction, best, shares, width)  # type: ignore[no-untyped-call]
        chosen = places[:, 0]
        added: torch.Tensor | float = 0.0
        if selector is not None:
            values = values - correction.expand(len(subset))[places]
            values = values + selector(batch.before[valid], subset[places], rows).float()
            chosen = places.gather(-1, values.argmax(-1, keepdim=True))[:, 0]
            added = _choice(values, places, best, shares, weights)
        loss = (weights * each).sum() / weights.sum().clamp(min=1e-6) + added
        right = torch.zeros_like(valid)
        right[valid] = (chosen == best[:, 0]) & known[:, 0]
        chain = right.long().cumprod(-1).float() * valid
        return Outcome(loss, (chain.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)).detach())

    def _subset(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of this step's softmax, and what is added to their scores."""
        if not self._drawn:
            return self._frequent, torch.zeros(1, device=self._head.device)
        draws = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(self._rare), generator=draws)[: self._drawn]
        subset = torch.cat((self._frequent, self._rare[drawn.to(self._head.device)]))
        correction = torch.zeros(len(subset), device=self._head.device)
        share = torch.tensor(len(self._rare) / self._drawn)
        correction[len(self._frequent) :] = share.log()
        return subset, correction


class _Nearness(torch.autograd.Function):
    """Cross entropy of rows ``[rows, hidden]`` against shares of their best ids, and the ``width``
    highest scores of each.

    The scores ``[rows, ids]`` of all rows would be most of a step's memory traffic. So they are
    made a slice at a time, and what they say about the rows' gradient is kept instead of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        head: torch.Tensor,
        correction: torch.Tensor,
        best: torch.Tensor,
        shares: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each row's loss, its highest scores, and their columns."""
        slopes, each, highest, places = [], [], [], []
        for start in range(0, max(1, len(rows)), _ROWS_AT_ONCE):
            states, ids, wanted = (t[start : start + _ROWS_AT_ONCE] for t in (rows, best, shares))
            scores = F.linear(states.to(head.dtype), head).float().add_(correction)
            most, columns = (
                scores.max(-1, keepdim=True) if width == 1 else scores.topk(width, dim=-1)
            )
            top = most[:, :1]
            said = scores.gather(-1, ids)
            powers = scores.sub_(top).exp_()
            mass = powers.sum(-1, keepdim=True)
            each.append((top + mass.log())[:, 0] - (wanted * said).sum(-1))
            highest.append(most)
            places.append(columns)
            slope = powers.div_(mass).scatter_add_(-1, ids, -wanted)
            slopes.append(slope.to(head.dtype) @ head)
        ctx.save_for_backward(torch.cat(slopes).to(rows.dtype))
        found = torch.cat(highest), torch.cat(places)
        ctx.mark_non_differentiable(*found)
        return torch.cat(each), *found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of the rows alone; the head is frozen."""
        (slopes,) = ctx.saved_tensors
        return slopes * grads[0][:, None], None, None, None, None, None


def _choice(
    scores: torch.Tensor,
    places: torch.Tensor,
    best: torch.Tensor,
    shares: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Loss of the choice among each slot's candidates, given the id before it.

    ``scores`` and ``places`` are ``[slots, width]``, of the candidates; ``best`` and ``shares``
    ``[slots, best]`` what the target says. Where its best id is no candidate nothing is learnt.
    """
    hit = places[:, :, None] == best[:, None]
    wanted = (hit * shares[:, None]).sum(-1)
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=1e-6)
    weights = weights * hit[:, :, 0].any(-1)
    each = -(wanted * scores.log_softmax(-1)).sum(-1)
    loss: torch.Tensor = (weights * each).sum() / weights.sum().clamp(min=1e-6)
    return loss
