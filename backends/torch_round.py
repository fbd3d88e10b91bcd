"""The device's part of a round: drafting, verifying and projecting, without a word to the host.

Each part is a function of tensors, so that it can be captured. A choice is part of it where it is
greedy and unpenalised; drawing is not, as a graph would keep the temperature and the state of the
random numbers that it was captured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .penalty_history import PenaltyHistory
from .torch_accept import Chooser, GreedyChooser
from .torch_advice import advise, slots_of, unpack
from .torch_draft import TorchDraft
from .torch_graphs import Graphs, Key
from .torch_probs import Drafted
from .torch_target import Target
from .torch_tree import Tree, descend, grow

_ANY_BUCKET = 0
"""For writes, which read no K/V."""


class DeviceRound:
    """The parts of a round over one target and its draft.

    Args:
        target: the target with its cache.
        draft: the draft bound to it; None for plain decoding only.
        graphs: runs the parts.
    """

    def __init__(self, target: Target, draft: TorchDraft | None, graphs: Graphs) -> None:
        self._target, self._draft, self._graphs = target, draft, graphs
        self._greedy = GreedyChooser()

    def draft(
        self,
        packed: torch.Tensor,
        chooser: Chooser,
        history: PenaltyHistory[torch.Tensor],
    ) -> tuple[torch.Tensor, Drafted]:
        """The block behind a packed anchor, an id for each slot that there is room for advice on,
        and the drafted ids."""
        draft = self._draft
        assert draft is not None
        rows = slots_of(packed) + 1
        bucket = draft.context.bucket_for(rows)
        if _greedy(chooser, history):
            greedy = partial(self._greedy_block, draft)
            (block,) = self._graphs.run(_key("draft", rows, bucket), greedy, packed)
            return block, Drafted(block[1:])
        asked = unpack(packed)
        slots = partial(self._slots, draft, len(asked.ids))
        scores, states = self._graphs.run(_key("slots", rows, bucket), slots, asked.anchor)
        scores = advise(history.adjust(scores, asked.anchor), asked.ids, asked.odds)
        drafted = self._chosen(draft, scores, states, asked.anchor, chooser)
        return torch.cat((asked.anchor, drafted.ids)), drafted

    def branch(self, packed: torch.Tensor, count: int) -> Tree:
        """The tree of ``count`` drafted ids behind a packed anchor, grown from as many slots as
        there is room for advice on."""
        draft = self._draft
        assert draft is not None
        key = _key("tree", count + 1, draft.context.bucket_for(slots_of(packed) + 1))
        grown = partial(self._grown, draft, count)
        return Tree(*self._graphs.run(key, grown, packed))

    def descend(self, tree: Tree) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Verify a tree: accepted and next, then ids and their rows in the tree, the accepted
        ones first, as one vector; tapped states in that order, which the cache has too.
        """
        rows = len(tree.ids)
        key = _key("descend", rows, self._target.cache.bucket_for(rows))
        outcome, *features = self._graphs.run(
            key, self._descended, tree.ids, tree.parents, tree.depths, tree.sees
        )
        return outcome, features[0] if features else None

    def verify(
        self,
        block: torch.Tensor,
        drafted: Drafted,
        chooser: Chooser,
        history: PenaltyHistory[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Accepted, next and the block's ids as one vector; tapped states where there is a draft.

        The states count until the next verify of as many rows.
        """
        rows = block.shape[0]
        bucket = self._target.cache.bucket_for(rows)
        if _greedy(chooser, history):
            outcome, *features = self._graphs.run(
                _key("verify", rows, bucket), self._greedy_verdict, block
            )
        else:
            logits, *features = self._graphs.run(_key("logits", rows, bucket), self._logits, block)
            judged = chooser.judge(history.adjust(logits, block), drafted)
            outcome = torch.cat((judged, block))
        return outcome, features[0] if features else None

    def project(self, features: torch.Tensor) -> None:
        """Make tapped states draft context."""
        draft = self._draft
        assert draft is not None
        rows = features.shape[0]
        fixed = rows <= draft.config.block_size and draft.context.bucket_for(rows) is not None
        key = _key("context", rows, _ANY_BUCKET if fixed else None)
        self._graphs.run(key, draft.project, features)
        draft.context.advance(rows)

    def _greedy_block(self, draft: TorchDraft, packed: torch.Tensor) -> Sequence[torch.Tensor]:
        asked = unpack(packed)
        states = draft.slots(asked.anchor, len(asked.ids))
        scores = draft.scores(states)
        ids = self._greedy.path(draft.lattice(scores, states, 1, asked)).ids
        return (torch.cat((asked.anchor, ids)),)

    def _grown(self, draft: TorchDraft, count: int, packed: torch.Tensor) -> Sequence[torch.Tensor]:
        asked = unpack(packed)
        states = draft.slots(asked.anchor, len(asked.ids))
        scores = draft.scores(states)
        tree = grow(asked.anchor, draft.lattice(scores, states, count, asked), count)
        return tree.ids, tree.parents, tree.depths, tree.sees

    def _descended(self, *parts: torch.Tensor) -> Sequence[torch.Tensor]:
        tree = Tree(*parts)
        target = self._target
        states = target.forward(tree.ids, tree)
        figures, order = descend(tree, self._greedy.pick(target.logits(states)))
        target.cache.arrange(order)
        outcome = torch.cat((figures, tree.ids[order], order))
        return (outcome,) if self._draft is None else (outcome, target.features()[order])

    def _slots(
        self, draft: TorchDraft, count: int, anchor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = draft.slots(anchor, count)
        return draft.spread(draft.scores(states)), states

    def _chosen(
        self,
        draft: TorchDraft,
        scores: torch.Tensor,
        states: torch.Tensor,
        anchor: torch.Tensor,
        chooser: Chooser,
    ) -> Drafted:
        if draft.selector is None:
            return chooser.draft(scores)
        return chooser.path(draft.selector.lattice(scores, states, anchor))

    def _greedy_verdict(self, block: torch.Tensor) -> Sequence[torch.Tensor]:
        logits, *features = self._logits(block)
        judged = self._greedy.judge(logits, Drafted(block[1:]))
        return torch.cat((judged, block)), *features

    def _logits(self, block: torch.Tensor) -> Sequence[torch.Tensor]:
        logits = self._target.logits(self._target.forward(block))
        return (logits,) if self._draft is None else (logits, self._target.features())


def _greedy(chooser: Chooser, history: PenaltyHistory[torch.Tensor]) -> bool:
    return isinstance(chooser, GreedyChooser) and not history.active


def _key(kind: str, rows: int, bucket: int | None) -> Key | None:
    return None if bucket is None else (kind, rows, bucket)
