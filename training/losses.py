"""How far a draft's slots are from what the target says there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .blocks import Batch
from .network import DraftNetwork
from .recipe import FitRecipe


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
        rows = slots[valid]
        scores = F.linear(rows, self._head[subset]).float() + correction
        best, mass = place[batch.best_ids[valid]], batch.best_probabilities[valid]
        known = best >= 0
        mass = mass * known
        logs = scores.log_softmax(-1).gather(-1, best.clamp(min=0))
        soft = -(mass * logs).sum(-1) / mass.sum(-1).clamp(min=1e-6)
        each = fit.soft * soft - (1 - fit.soft) * logs[:, 0]
        weights = weights * known[:, 0]
        loss = (weights * each).sum() / weights.sum().clamp(min=1e-6)
        chosen = scores.argmax(-1)
        if network.config.v2 is not None:
            ids = (batch.before[valid], subset)
            added, chosen = _selected(network, rows, scores, ids, best, weights)
            loss = loss + added
        right = torch.zeros_like(valid)
        right[valid] = chosen == best[:, 0]
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


def _selected(
    network: DraftNetwork,
    rows: torch.Tensor,
    scores: torch.Tensor,
    ids: tuple[torch.Tensor, torch.Tensor],
    best: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of the choice among each slot's candidates given the id before it, and the choice.

    ``ids`` are those before the slots and those that the scores stand for.
    """
    selector = network.candidate_selector
    before, subset = ids
    values, places = scores.topk(min(selector.width, scores.shape[-1]), dim=-1)
    totals = values + selector(before, subset[places], rows).float()
    hit = places == best[:, :1]
    weights = weights * hit.any(-1)
    logs = (totals.log_softmax(-1) * hit).sum(-1)
    loss = -(weights * logs).sum() / weights.sum().clamp(min=1e-6)
    return loss, places.gather(-1, totals.argmax(-1, keepdim=True))[:, 0]
