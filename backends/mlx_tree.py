"""A drafted tree: the likeliest continuations of an anchor, verified in one forward.

A block-diffusion draft gives every slot a distribution, and the best id of a slot is often the
second best. Instead of one path, the rows of a verify go to those continuations that are likeliest
as a whole; every row sees its own ancestors alone. Pure and lazy functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .mlx_probs import Lattice, best_columns

_DEEPER = 1e-3
"""Taken off per step, so that a certain child still comes after its parent."""
_HOPELESS = -50.0
"""No step counts as less likely: sums stay small enough in fp32 for what is taken off to count."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of one verify, the anchor's first, then drafted ids, the likeliest continuation first.

    A parent comes before its children, and the front of a tree is a tree.
    """

    ids: mx.array
    """``[rows]``."""
    parents: mx.array
    """Rows ``[rows]``; the anchor is its own."""
    depths: mx.array
    """Steps from the anchor, ``[rows]``."""
    sees: mx.array
    """Bool ``[rows, rows]``: whether a row sees another, that is itself and its ancestors."""

    @property
    def rows(self) -> int:
        """The anchor and the drafted ids."""
        return int(self.ids.shape[0])


def independent(scores: mx.array, width: int) -> Lattice:
    """Log probabilities of the best ``width`` ids of slots that do not depend on each other.

    ``scores`` are ``[count, vocab]``.
    """
    scores = scores.astype(mx.float32)
    ids = best_columns(scores, min(width, scores.shape[-1]))
    values = mx.take_along_axis(scores, ids, axis=-1)
    steps = (values - mx.logsumexp(scores, axis=-1, keepdims=True))[:, None]
    return Lattice(ids, mx.broadcast_to(steps, (*ids.shape, ids.shape[-1])))


def grow(anchor: mx.array, lattice: Lattice, count: int) -> Tree:
    """The ``count`` likeliest continuations of ``anchor`` ``[1]``, by log probabilities of steps.

    No more of a level can be among them than ids are left for it, so a level is cut to that.
    """
    slots, width = lattice.candidates.shape
    steps = mx.maximum(lattice.scores, _HOPELESS) - _DEEPER
    scores = steps[0, :1]
    before = mx.zeros((1,), dtype=mx.int32)
    found: list[tuple[mx.array, mx.array, mx.array]] = []
    offset = 0
    for slot in range(min(slots, count)):
        flat = scores.flatten()
        places = best_columns(flat, min(count - slot, flat.shape[0]))
        kept, columns = flat[places], places % width
        found.append((kept, before[places // width], lattice.candidates[slot][columns]))
        if slot + 1 < slots:
            scores = kept[:, None] + steps[slot + 1][columns]
            before = offset + 1 + mx.arange(kept.shape[0], dtype=mx.int32)
            offset += kept.shape[0]
    kept, before, ids = (mx.concatenate(list(part)) for part in zip(*found, strict=True))
    chosen = best_columns(kept, min(count, kept.shape[0]))
    rows = mx.arange(chosen.shape[0] + 1, dtype=mx.int32)
    row_of = mx.zeros((kept.shape[0] + 1,), dtype=mx.int32)
    row_of = mx.put_along_axis(row_of, chosen + 1, rows[1:], axis=0)
    parents = mx.concatenate([rows[:1], row_of[before[chosen]]])
    sees = _ancestors(parents, min(slots, count))
    return Tree(
        ids=mx.concatenate([anchor, ids[chosen].astype(anchor.dtype)]),
        parents=parents,
        depths=sees.astype(mx.int32).sum(axis=-1) - 1,
        sees=sees,
    )


def _ancestors(parents: mx.array, depth: int) -> mx.array:
    """Who sees whom; every product doubles how far back a row knows its ancestors."""
    rows = mx.arange(parents.shape[0])
    known = ((rows[:, None] == rows) | (parents[:, None] == rows)).astype(mx.float32)
    reach = 1
    while reach < depth:
        known = mx.minimum(known @ known, 1.0)
        reach *= 2
    return known > 0.0


def descend(tree: Tree, chosen: mx.array) -> tuple[mx.array, mx.array]:
    """Follow the target's own ids ``chosen`` ``[rows]``, one behind every row.

    Returns int32 ``[2]``, accepted and next, and the order ``[rows]`` that brings the anchor and
    the accepted rows to the front.
    """
    rows = mx.arange(tree.rows, dtype=mx.int32)
    wrong = (tree.ids != chosen[tree.parents]) & (rows > 0)
    kept = ~mx.any(tree.sees & wrong, axis=-1)
    last = mx.argmax(mx.where(kept, tree.depths, -1), axis=-1, keepdims=True)
    order = mx.argsort(mx.where(tree.sees[last][0], tree.depths, rows + tree.rows))
    figures = [tree.depths[last], chosen[last]]
    return mx.concatenate([f.astype(mx.int32) for f in figures]), order.astype(mx.int32)
