"""A drafted tree: the likeliest continuations of an anchor, verified in one forward.

A block-diffusion draft gives every slot a distribution, and the best id of a slot is often the
second best. Instead of one path, the rows of a verify go to those continuations that are likeliest
as a whole; every row sees its own ancestors alone. Pure functions on any device, without a host
read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .torch_probs import Lattice

_DEEPER = 1e-3
"""Taken off per step, so that a certain child still comes after its parent."""
_HOPELESS = -50.0
"""No step counts as less likely: sums stay small enough in fp32 for what is taken off to count."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of one verify, the anchor's first, then drafted ids, the likeliest continuation first.

    A parent comes before its children, and the front of a tree is a tree.
    """

    ids: torch.Tensor
    """``[rows]``."""
    parents: torch.Tensor
    """Rows ``[rows]``; the anchor is its own."""
    depths: torch.Tensor
    """Steps from the anchor, ``[rows]``."""
    sees: torch.Tensor
    """Bool ``[rows, rows]``: whether a row sees another, that is itself and its ancestors."""


def independent(scores: torch.Tensor, width: int) -> Lattice:
    """Log probabilities of the best ``width`` ids of slots that do not depend on each other.

    ``scores`` are ``[count, vocab]``.
    """
    logs = scores.log_softmax(dim=-1, dtype=torch.float32)
    values, ids = logs.topk(min(width, scores.shape[-1]), dim=-1)
    return Lattice(ids, values[:, None].expand(-1, ids.shape[-1], -1))


def grow(anchor: torch.Tensor, lattice: Lattice, count: int) -> Tree:
    """The ``count`` likeliest continuations of ``anchor`` ``[1]``, by log probabilities of steps.

    No more of a level can be among them than ids are left for it, so a level is cut to that.
    """
    slots, width = lattice.candidates.shape
    device = anchor.device
    steps = lattice.scores.clamp(min=_HOPELESS) - _DEEPER
    scores = steps[0, :1]
    before = torch.zeros(1, dtype=torch.long, device=device)
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    offset = 0
    for slot in range(min(slots, count)):
        kept, places = scores.flatten().topk(min(count - slot, scores.numel()))
        columns = places % width
        found.append((kept, before[places // width], lattice.candidates[slot][columns]))
        if slot + 1 < slots:
            scores = kept[:, None] + steps[slot + 1][columns]
            before = offset + 1 + torch.arange(len(kept), device=device)
            offset += len(kept)
    kept, before, ids = (torch.cat(part) for part in zip(*found, strict=True))
    chosen = kept.topk(min(count, len(kept))).indices
    rows = torch.arange(len(chosen) + 1, device=device)
    row_of = torch.zeros(len(kept) + 1, dtype=torch.long, device=device)
    row_of[chosen + 1] = rows[1:]
    parents = torch.cat((rows[:1], row_of[before[chosen]]))
    sees = _ancestors(parents, min(slots, count))
    return Tree(
        ids=torch.cat((anchor, ids[chosen])),
        parents=parents,
        depths=sees.sum(dim=-1) - 1,
        sees=sees,
    )


def _ancestors(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """Who sees whom; every product doubles how far back a row knows its ancestors."""
    known = torch.eye(len(parents), device=parents.device)
    known.scatter_(1, parents[:, None], 1.0)
    reach = 1
    while reach < depth:
        known = (known @ known).clamp_(max=1.0)
        reach *= 2
    return known > 0.0


def descend(tree: Tree, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Follow the target's own ids ``chosen`` ``[rows]``, one behind every row.

    Returns ``[2]``, accepted and next, and the order ``[rows]`` that brings the anchor and the
    accepted rows to the front.
    """
    wrong = tree.ids != chosen[tree.parents]
    wrong[:1].zero_()
    kept = ~(tree.sees & wrong).any(dim=-1)
    last = torch.where(kept, tree.depths, -1).argmax(dim=-1, keepdim=True)
    order = torch.where(tree.sees[last][0], tree.depths, len(tree.ids)).argsort(stable=True)
    return torch.cat((tree.depths[last], chosen[last])), order
