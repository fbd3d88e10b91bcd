"""The PyTorch backend: target, draft and caches on one device, CPU and CUDA alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from time import perf_counter
from typing import Concatenate, ParamSpec, TypeVar

import torch

from dflash_local.backend import BackendInfo, Coverage, MemoryFigures, Proposal, Verdict
from dflash_local.branches import Branches
from dflash_local.lookup import NOTHING, Found
from dflash_local.sampling import SamplingParams

from .penalty_history import PenaltyHistory
from .torch_accept import Chooser, GreedyChooser, chooser
from .torch_advice import pack
from .torch_cache import SLICE
from .torch_draft import TorchDraft
from .torch_graphs import Graphs
from .torch_memory import memory_errors
from .torch_penalties import TorchPenalties
from .torch_probs import Drafted
from .torch_round import DeviceRound
from .torch_target import Target
from .torch_tree import Tree

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PENDING_ROWS = 256
"""Rows of features kept unprojected while nothing is drafted."""

_Method = Callable[Concatenate["TorchBackend", _P], _T]


def _on_device(method: _Method[_P, _T]) -> _Method[_P, _T]:
    """A step without gradients, whose lack of memory is told with what to try."""

    @wraps(method)
    def step(self: TorchBackend, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch.inference_mode(), memory_errors(f"Out of memory on {self.device}.", self.device):
            return method(self, *args, **kwargs)

    return step


@dataclass(frozen=True, slots=True)
class TorchProposal:
    """A block on the device: the anchor and the drafted ids."""

    block: torch.Tensor
    drafted: Drafted
    draft_ms: float | None
    tree: Tree | None = None
    """How the block's rows hang together; None where each follows the one before."""

    @property
    def rows(self) -> int:
        """The anchor plus the drafted ids."""
        return int(self.block.shape[0])


class TorchBackend:
    """The contract of ``Backend`` over a ``Target`` and a ``TorchDraft``.

    Args:
        info: what was loaded.
        target: the target with its cache.
        draft: the draft bound to it; None for plain decoding only.
        graphs: runs what its caches give fixed addresses; None where they do not.
    """

    def __init__(
        self,
        info: BackendInfo,
        target: Target,
        draft: TorchDraft | None,
        graphs: Graphs | None = None,
    ) -> None:
        self.device = target.device
        self._info = info
        self._target = target
        self._draft = draft
        self._graphs = graphs
        runner = graphs or Graphs(target.device, capture=False)
        self._round = DeviceRound(target, draft, runner)
        self._chooser: Chooser = GreedyChooser()
        penalties = TorchPenalties(target.shape.vocab_size, target.device)
        self._history = PenaltyHistory(penalties)
        self._last: torch.Tensor | None = None
        """Final state ``[1, hidden]`` of the last position, while it may be sampled from."""
        self._pending: list[torch.Tensor] = []
        self._pending_rows = 0
        self._open: tuple[int, ...] = ()
        """The ids of the block between verify and commit."""
        self._features: torch.Tensor | None = None
        """Its tapped states."""
        self._sync = self.device.type == "cpu"
        self._branching = info.branches(SamplingParams())

    @property
    def info(self) -> BackendInfo:
        """What is loaded; a failed capture shows among the kernels as soon as it happened."""
        if self._graphs is None:
            return self._info
        return replace(self._info, kernels=(*self._info.kernels, self._graphs.words))

    @property
    def position(self) -> int:
        """Target positions in the cache."""
        return self._target.cache.length

    @property
    def coverage(self) -> Coverage:
        """Positions covered by each cache."""
        draft = self._draft.context.length if self._draft else 0
        return Coverage(self._target.cache.length, draft, self._pending_rows)

    def configure(self, sampling: SamplingParams) -> None:
        """Set how tokens are chosen, and reseed."""
        self._chooser = chooser(sampling, self.device)
        self._branching = self._info.branches(sampling)
        self._history.configure(sampling)

    @_on_device
    def rewind(self, position: int) -> int:
        """Go back to at most ``position``, target and draft together."""
        self._last, self._open = None, ()
        reached = self._target.cache.crop(position)
        if self._draft is not None:
            if reached > self._draft.context.length:
                self._project()
            else:
                self._pending, self._pending_rows = [], 0
            self._draft.context.crop(reached)
            # Features of a failed round may be missing; both caches then end at the same place.
            reached = self._target.cache.crop(self._draft.context.length)
            self._draft.context.crop(reached)
        self._history.rewind(reached)
        return reached

    @_on_device
    def extend(self, tokens: Sequence[int]) -> None:
        """One slice of a prefill; its features go to the draft at once."""
        self._target.cache.mark()
        for start in range(0, len(tokens), SLICE):
            piece = tokens[start : start + SLICE]
            states = self._target.forward(self._ids(piece))
            self._keep_features(self._tapped(), drafting=True)
            self._target.cache.advance(len(piece))
            self._last = states[-1:]
        self._history.extend(tokens)

    @_on_device
    def sample(self) -> int:
        """A token from the last position's logits."""
        return int(self._chooser.pick(self._history.adjust(self._last_logits())).item())

    @_on_device
    def margin(self) -> float:
        """Top-1 minus top-2 logit at the last position."""
        best = self._last_logits().float().topk(2, dim=-1).values[0]
        return float((best[0] - best[1]).item())

    @_on_device
    def propose(self, pending: int, count: int, found: Found = NOTHING) -> TorchProposal:
        """Draft ``count`` ids after ``pending``."""
        if count == 0 or self._draft is None:
            anchor = self._ids((pending,))
            return TorchProposal(anchor, Drafted(anchor[1:]), 0.0)
        begun = perf_counter()
        branching = self._branching and count > 1
        slots = min(count, self._info.block_size - 1) if branching else count
        known = found.within(self._draft.config.vocab_size or self._info.vocab_size)
        packed = pack(pending, known, slots, self.device)
        self._project()
        tree: Tree | None = None
        if branching:
            tree = self._round.branch(packed, count)
            block, drafted = tree.ids, Drafted(tree.ids[1:])
        else:
            block, drafted = self._round.draft(packed, self._chooser, self._history)
        draft_ms = 1000.0 * (perf_counter() - begun) if self._sync else None
        return TorchProposal(block, drafted, draft_ms, tree)

    @_on_device
    def verify(self, proposal: Proposal) -> Verdict:
        """Run the target over the block; its one host read decides the round."""
        assert isinstance(proposal, TorchProposal)
        begun = perf_counter()
        branches: Branches | None = None
        if proposal.tree is not None:
            outcome, self._features = self._round.descend(proposal.tree)
            accepted, following, *ids = outcome.tolist()
            ids, kept = ids[: proposal.rows], ids[proposal.rows :][: accepted + 1]
            self._target.cache.gather(kept)
            slots = min(proposal.rows, self._info.block_size) - 1
            branches = Branches(slots, tuple(kept[1:]))
        else:
            outcome, self._features = self._round.verify(
                proposal.block, proposal.drafted, self._chooser, self._history
            )
            accepted, following, *ids = outcome.tolist()
        self._last, self._open = None, tuple(ids)
        return Verdict(
            drafted=self._open[1:],
            accepted=accepted,
            next=following,
            branches=branches,
            draft_ms=proposal.draft_ms,
            verify_ms=1000.0 * (perf_counter() - begun) if self._sync else None,
        )

    @_on_device
    def commit(self, keep: int) -> None:
        """Keep the first ``keep`` rows of the open block."""
        assert 1 <= keep <= len(self._open), f"keep {keep} of {len(self._open)} open rows"
        if self._features is not None:
            self._keep_features(self._features[:keep], drafting=len(self._open) > 1)
            self._features = None
        self._target.cache.advance(keep)
        self._history.commit(self._open[:keep])
        self._open = ()

    def memory(self) -> MemoryFigures:
        """Bytes held."""
        draft_weights = self._draft.bytes if self._draft else 0
        cache = self._target.cache.bytes + (self._draft.context.bytes if self._draft else 0)
        peak = total = 0
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            total = torch.cuda.get_device_properties(self.device).total_memory
        return MemoryFigures(self._target.bytes(), draft_weights, cache, peak, total)

    def close(self) -> None:
        """Give the memory back."""
        self._pending, self._last, self._features = [], None, None
        if self._graphs is not None:
            self._graphs.close()
        self._target.close()
        self._draft = None
        del self._round
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=self.device)

    def _last_logits(self) -> torch.Tensor:
        assert self._last is not None, "no logits: extend first"
        return self._target.logits(self._last)

    def _tapped(self) -> torch.Tensor | None:
        return None if self._draft is None else self._target.features()

    def _keep_features(self, features: torch.Tensor | None, *, drafting: bool) -> None:
        """Hand tapped states to the draft, or let them wait.

        While nothing is drafted they are projected in bulk: row by row the draft's projections
        would cost a plain step about as much as a layer.
        """
        if features is None:
            return
        # The next verify may write over what it gave.
        self._pending.append(features if drafting else features.clone())
        self._pending_rows += features.shape[0]
        if drafting or self._pending_rows >= _PENDING_ROWS:
            self._project()

    def _project(self) -> None:
        if self._draft is not None and self._pending:
            features = self._pending[0] if len(self._pending) == 1 else torch.cat(self._pending)
            self._round.project(features)
            self._pending, self._pending_rows = [], 0
