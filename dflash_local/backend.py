"""The seam: what the loop asks of a backend, and the values that cross it.

Tensors never cross. Token ids are Python ints, times are milliseconds, sizes are bytes.
Every call is made on the one thread that loaded the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_local.branches import Branches
from dflash_local.lookup import NOTHING, Found
from dflash_local.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What is loaded, where, and what it can do."""

    backend: str
    """``torch``, ``mlx`` or ``scripted``."""
    target: str
    draft: str | None
    """Name of the draft; None when the target runs alone."""
    device: str
    dtype: str
    quantization: str
    """``none``, ``nf4``, ``int8`` or the MLX layout, for example ``4-bit g32``."""
    vocab_size: int
    block_size: int
    """The trained block, the anchor included: most ids that a round can emit; 1 without a draft."""
    context: int
    """Positions that the target's cache can hold."""
    stop_ids: tuple[int, ...]
    """Every end-of-sequence id of the target's generation config."""
    versions: tuple[tuple[str, str], ...] = ()
    kernels: tuple[str, ...] = ()
    """Kernels and fallbacks in use, in words, for ``doctor`` and the bench report."""
    branching: bool = False
    """Whether drafts may be trees."""

    def branches(self, sampling: SamplingParams) -> bool:
        """Whether drafts are trees under these settings."""
        return self.branching and sampling.branches and self.block_size > 1

    def rows(self, sampling: SamplingParams) -> int:
        """Most rows in one verify: a path has those of the trained block, a tree twice as many."""
        return 2 * self.block_size if self.branches(sampling) else self.block_size


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verify decided."""

    drafted: tuple[int, ...]
    """The ids that the draft really proposed, rejected ones included; of a tree the accepted ones
    come first."""
    accepted: int
    """How many of them, from the front, the target accepted."""
    next: int
    """The target's own token after the accepted ones: a correction, or the bonus."""
    draft_ms: float | None = None
    """Time of the draft pass, where the device can tell it exactly; else None."""
    verify_ms: float | None = None
    """Time of the verify pass, where the device can tell it exactly; else None."""
    branches: Branches | None = None
    """How the draft branched; None where each id followed the one before."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The accepted ids followed by the target's own."""
        return (*self.drafted[: self.accepted], self.next)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Positions covered by each cache; logical lengths, also where a window stores fewer rows.

    At the top of every round ``target == position`` and ``draft + pending == target`` hold
    when a draft is loaded; without one ``draft`` and ``pending`` are 0.
    """

    target: int
    draft: int
    pending: int
    """Rows whose features are kept but not yet projected into the draft's context K/V."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes held; a figure that the device cannot tell is 0."""

    weights: int
    draft: int
    cache: int
    peak: int
    total: int


class Proposal(Protocol):
    """A drafted block on its way to the verify. Its contents belong to the backend."""

    @property
    def rows(self) -> int:
        """Rows to verify: the anchor plus the drafted ids."""
        ...


class Backend(Protocol):
    """A target, its draft and their caches on one device."""

    @property
    def info(self) -> BackendInfo:
        """What is loaded; constant from load to close."""
        ...

    @property
    def position(self) -> int:
        """Target positions committed to the cache."""
        ...

    @property
    def coverage(self) -> Coverage:
        """What each cache covers now; for checks, never for decisions."""
        ...

    def configure(self, sampling: SamplingParams) -> None:
        """Set how tokens are chosen, and reseed.

        Raises:
            OptionError: a field that this backend cannot honour is set.
        """
        ...

    def rewind(self, position: int) -> int:
        """Go back to at most ``position`` and return where it got to.

        A cache that can be trimmed reaches what was asked, a recurrent one a checkpoint or 0.
        Target and draft go back together. The last position's logits are gone afterwards:
        ``extend`` before ``sample``.
        """
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Feed ``tokens`` as context, without choosing any: one slice of a prefill."""
        ...

    def sample(self) -> int:
        """Choose a token from the last position's logits."""
        ...

    def margin(self) -> float:
        """Top-1 minus top-2 logit at the last position, where ``sample`` would be allowed.

        A diagnosis for reports; the loop never asks.
        """
        ...

    def propose(self, pending: int, count: int, found: Found = NOTHING) -> Proposal:
        """Draft ``count`` ids after ``pending``, the newest token, which is in no cache.

        ``found`` is advice on the slots of the draft, which makes the ids in it likelier by their
        odds; a backend may do without.

        0 skips the draft. Where the sampling lets it, the ids may be a tree instead of a path: the
        likeliest continuations of the anchor. The result may be lazy. A proposal that is never
        verified is dropped without effect. The caller keeps ``count`` below ``info.rows`` and
        ``position + count + 1`` within the context.
        """
        ...

    def verify(self, proposal: Proposal) -> Verdict:
        """Run the target over the block and decide acceptance; the round's one wait.

        Opens a block that exactly one ``commit`` closes. If it raises, the state is as before,
        or invalid until ``rewind(0)``.
        """
        ...

    def commit(self, keep: int) -> None:
        """Keep the first ``keep`` rows just verified, ``1 <= keep <= rows``; drop the others. Of a
        tree no more than the anchor and the accepted ids lie one behind the other.

        ``position`` grows by ``keep``. The features of the kept rows become draft context.
        """
        ...

    def memory(self) -> MemoryFigures:
        """Bytes held now."""
        ...

    def close(self) -> None:
        """Give the memory back. No call may follow."""
        ...
