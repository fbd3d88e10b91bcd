"""The seam on MLX: one target, its draft, their caches, one wait per round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from dflash_local.backend import BackendInfo, Coverage, MemoryFigures, Proposal, Verdict
from dflash_local.branches import Branches
from dflash_local.errors import EngineError
from dflash_local.lookup import NOTHING, Found
from dflash_local.sampling import SamplingParams

from .mlx_advice import Asked
from .mlx_choice import Chooser, Greedy, chooser
from .mlx_draft import Draft
from .mlx_host import read_float, read_ints, submit, wait
from .mlx_penalties import MlxPenalties
from .mlx_probs import Drafted
from .mlx_target import Target
from .mlx_tree import Tree, descend
from .penalty_history import PenaltyHistory

PENDING_ROWS = 256
"""Feature rows that wait for the draft at most while it is not asked."""
PREFILL_BYTES = 1 << 28
"""Freed memory that may stay cached at the end of a prefill."""
MARK_ROWS = 16
"""Rows before the end of a prefill where a state is saved: the next prompt of a chat often
departs just before this one's end."""


@dataclass(frozen=True, slots=True)
class MlxProposal:
    """A block on its way to the verify."""

    pending: int
    drafted: Drafted | None
    count: int
    tree: Tree | None = None
    """In place of ``drafted``, where the draft branched."""

    @property
    def rows(self) -> int:
        """The anchor plus the drafted ids."""
        return self.count + 1 if self.tree is None else self.tree.rows


@dataclass(frozen=True, slots=True)
class _Block:
    """A verified block that waits for its commit."""

    ids: tuple[int, ...]
    features: mx.array | None


class MlxBackend:
    """A target and its draft on this machine's MLX device.

    Args:
        target: the target, tapped for the draft.
        draft: the draft; None decodes plainly.
        info: what is loaded.
        cache_limit: bytes of freed memory that MLX may keep for reuse.
    """

    def __init__(
        self, target: Target, draft: Draft | None, info: BackendInfo, *, cache_limit: int
    ) -> None:
        self._target, self._draft, self._info = target, draft, info
        self._previous_limit = mx.set_cache_limit(cache_limit)
        self._chooser: Chooser = Greedy()
        self._penalties = PenaltyHistory(MlxPenalties(info.vocab_size))
        self._pending: list[mx.array] = []
        self._last: mx.array | None = None
        self._block: _Block | None = None
        self._broken = False
        self._branching = info.branches(SamplingParams())
        self._weights = target.bytes

    @property
    def info(self) -> BackendInfo:
        """What is loaded."""
        return self._info

    @property
    def position(self) -> int:
        """Target positions committed."""
        return self._target.history.position

    @property
    def coverage(self) -> Coverage:
        """What each cache covers now."""
        if self._draft is None:
            return Coverage(self.position, 0, 0)
        return Coverage(self.position, self._draft.length, self._pending_rows)

    def configure(self, sampling: SamplingParams) -> None:
        """Set how ids are chosen, and reseed."""
        self._chooser = chooser(sampling)
        self._branching = self._info.branches(sampling)
        self._penalties.configure(sampling)

    def rewind(self, position: int) -> int:
        """Go back with both caches; a window or a recurrent state may reach less than asked."""
        self._block, self._last = None, None
        history = self._target.history
        lost = position <= 0 or self._broken
        reached = history.reset() if lost else history.rewind(position)
        self._broken = False
        self._penalties.rewind(reached)
        if self._draft is not None:
            self._crop_draft(self._draft, reached)
        return reached

    def extend(self, tokens: Sequence[int]) -> None:
        """Feed context; the draft's context K/V follow at once."""
        self._check_whole()
        ids = mx.array(list(tokens), dtype=mx.int32)
        history = self._target.history
        with self._or_broken():
            if self._last is not None:
                # The slice before must be done, so that progress is true and memory bounded.
                wait(self._last)
            if not history.trimmable and len(tokens) > 2 * MARK_ROWS:
                self._feed(ids[:-MARK_ROWS])
                history.mark()
                ids = ids[-MARK_ROWS:]
            hidden = self._feed(ids)
            self._last = hidden[-1:]
            submit(self._last, *self._state())
        self._penalties.extend(tokens)

    def sample(self) -> int:
        """An id from the last position's logits."""
        token = read_ints(self._chooser.pick(self._penalties.adjust(self._last_logits())))[0]
        # What a prefill freed is of no use to the rounds that follow.
        if mx.get_cache_memory() > PREFILL_BYTES:
            mx.clear_cache()
        return token

    def margin(self) -> float:
        """Top-1 minus top-2 logit at the last position."""
        best = mx.topk(self._last_logits()[0].astype(mx.float32), 2)
        return read_float(mx.abs(best[0] - best[1]))

    def propose(self, pending: int, count: int, found: Found = NOTHING) -> MlxProposal:
        """Submit the draft's pass; nothing is waited for."""
        self._check_whole()
        if count == 0 or self._draft is None:
            return MlxProposal(pending, None, 0)
        asked = Asked(mx.array([pending], dtype=mx.int32), found)
        with self._or_broken():
            self._project(self._draft)
            if self._branching and count > 1:
                tree = self._draft.branch(asked, count)
                submit(tree.ids, tree.sees)
                return MlxProposal(pending, None, count, tree)
            drafted = self._draft.propose(asked, count, self._chooser, self._penalties.adjust)
            submit(drafted.ids)
        return MlxProposal(pending, drafted, count)

    def verify(self, proposal: Proposal) -> Verdict:
        """One target pass; acceptance is part of it, and its result is the one thing waited for."""
        assert isinstance(proposal, MlxProposal)
        self._check_whole()
        if proposal.tree is not None:
            return self._descend(proposal.tree)
        ids = mx.array([proposal.pending], dtype=mx.int32)
        if proposal.drafted is not None:
            ids = mx.concatenate([ids, proposal.drafted.ids])
        with self._or_broken():
            result = self._target.forward(ids, revocable=True)
            logits = self._penalties.adjust(self._target.logits(result.hidden), ids)
            outcome = mx.concatenate([self._chooser.judge(logits, proposal.drafted), ids])
            accepted, chosen, *block = self._read(outcome, result.features)
            self._block = _Block(tuple(block), result.features)
        return Verdict(tuple(block[1:]), accepted, chosen)

    def _descend(self, tree: Tree) -> Verdict:
        """The same for a tree, whose accepted rows come first afterwards."""
        with self._or_broken():
            result = self._target.forward(tree.ids, revocable=True, tree=tree)
            chosen = self._chooser.pick(self._target.logits(result.hidden))
            figures, order = descend(tree, chosen)
            features = None if result.features is None else result.features[order]
            outcome = mx.concatenate([figures, tree.ids[order], order])
            accepted, following, *rest = self._read(outcome, features)
            block, kept = tuple(rest[: tree.rows]), rest[tree.rows :][: accepted + 1]
            self._target.gather(kept)
            self._block = _Block(block, features)
        slots = min(tree.rows, self._info.block_size) - 1
        branches = Branches(slots, tuple(kept[1:]))
        return Verdict(block[1:], accepted, following, branches=branches)

    def _read(self, outcome: mx.array, features: mx.array | None) -> list[int]:
        """Wait for a round's outcome. What it leaves is submitted with it, so that the state is
        ready when the next round begins."""
        state = self._target.history.arrays()
        submit(outcome, *([] if features is None else [features]), *state)
        self._last = None
        return read_ints(outcome)

    def commit(self, keep: int) -> None:
        """Keep the first rows of the block; their features become draft context."""
        block = self._block
        assert block is not None, "commit without verify"
        assert 1 <= keep <= len(block.ids), f"keep {keep} of {len(block.ids)} rows"
        self._block = None
        history = self._target.history
        with self._or_broken():
            history.commit(self.position + keep)
            self._penalties.commit(block.ids[:keep])
            if self._draft is None or block.features is None:
                return
            self._pending.append(block.features[:keep])
            if len(block.ids) > 1 or self._pending_rows >= PENDING_ROWS:
                self._project(self._draft)
            submit(self._state())

    def memory(self) -> MemoryFigures:
        """Bytes held now."""
        total = mx.device_info().get("max_recommended_working_set_size", 0)
        cache = self._target.history.bytes
        if self._draft is not None:
            cache += sum(a.nbytes for a in self._draft.cache_arrays())
        return MemoryFigures(
            weights=self._weights,
            draft=0 if self._draft is None else self._draft.bytes,
            cache=cache,
            peak=mx.get_peak_memory(),
            total=int(total),
        )

    def close(self) -> None:
        """Give the memory back."""
        self._pending, self._last, self._block = [], None, None
        del self._target, self._draft
        mx.clear_cache()
        mx.set_cache_limit(self._previous_limit)

    def _feed(self, ids: mx.array) -> mx.array:
        """One forward over context ids, counted at once in both caches."""
        result = self._target.forward(ids)
        self._target.history.advance(ids.shape[0])
        if self._draft is not None and result.features is not None:
            self._pending.append(result.features)
            self._project(self._draft)
        return result.hidden

    def _project(self, draft: Draft) -> None:
        """Give the waiting feature rows to the draft."""
        if self._pending:
            rows = self._pending
            draft.append(rows[0] if len(rows) == 1 else mx.concatenate(rows))
            self._pending = []

    def _crop_draft(self, draft: Draft, position: int) -> None:
        """Let the draft, and the rows that wait for it, end at ``position``."""
        waiting = position - draft.length
        if waiting > 0:
            self._pending = [mx.concatenate(self._pending)[:waiting]]
            return
        self._pending = []
        if position == 0:
            draft.reset()
        else:
            draft.crop(position)

    @property
    def _pending_rows(self) -> int:
        return sum(rows.shape[0] for rows in self._pending)

    def _state(self) -> list[mx.array]:
        """All that outlives a round."""
        draft = [] if self._draft is None else self._draft.cache_arrays()
        return [*self._target.history.arrays(), *draft, *self._pending]

    def _last_logits(self) -> mx.array:
        assert self._last is not None, "no logits: extend first"
        return self._target.logits(self._last)

    @contextmanager
    def _or_broken(self) -> Iterator[None]:
        """What runs inside moves caches: if it raises, they are not whole."""
        try:
            yield
        except BaseException:
            self._broken, self._block = True, None
            raise

    def _check_whole(self) -> None:
        assert self._block is None, "a block is open: commit first"
        if self._broken:
            raise EngineError(
                "The caches are not whole after a failed round.", "Rewind to 0 and feed again."
            )
