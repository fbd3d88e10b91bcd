"""How many bytes a pair takes at its peak: what the backends allocate, counted.

Checked against measured peaks on the CPU, on torch and on MLX. On a GPU the same counts are an
estimate; the driver's own context is part of the reserve that ``free_memory`` leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.draft_config import DraftConfig
from dflash_local.free_memory import cpu_bf16, cpu_fuses
from dflash_local.pairs import Shape

PREFILL_SLICE = 512
"""Rows of one prefill step; its activations are the workspace."""
SCORES_AT_ONCE = 2**23
"""Scores of attention that torch holds at once, where no fused kernel does without them."""
COLUMN_STEP = 64
"""Rows of K/V that a CPU reads at once."""
_TORCH_MARGIN = 256 + PREFILL_SLICE
"""Rows that torch keeps behind a sliding window: what short rewinds need, and a slice."""
_MLX_MARGIN = 512 + PREFILL_SLICE
_MLX_STEP = 256
_FUSED_HEAD_DIMS = (64, 80, 128)
"""Head sizes for which Metal's attention of many rows holds no matrix of scores."""
_FUSED_STEP = 16
"""Head sizes for which a CPU's own attention holds none are multiples of it."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a pair takes, by purpose."""

    weights: int
    draft: int
    cache: int
    """The target's K/V for the whole context, and recurrent states."""
    draft_cache: int
    workspace: int
    """Activations, masks and scores of the widest step, or what loading holds meanwhile."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.draft + self.cache + self.draft_cache + self.workspace


@dataclass(frozen=True, slots=True)
class Sizes:
    """What does not depend on the context."""

    shape: Shape
    weights: int
    """Bytes of the target once loaded."""
    draft_weights: int
    backend: str
    device: str
    """``cuda``, ``metal`` or ``cpu``."""
    width: float
    """Bytes of one activation."""
    draft: DraftConfig | None = None
    kv_bits: int = 16
    """Of the target's K/V; 16 is as they are computed."""
    loading: int = 0
    """Bytes that only loading holds, beside the weights and before there is a cache."""

    def need(self, context: int) -> Need:
        """The peak with ``context`` positions."""
        cache, draft_cache = self._cache(context), self._draft_cache(context)
        workspace = max(self._workspace(context), self.loading - cache - draft_cache)
        return Need(self.weights, self.draft_weights, cache, draft_cache, workspace)

    def _cache(self, context: int) -> int:
        shape = self.shape
        full = shape.kv_layers * shape.kv_heads * shape.head_dim * self._rows(context)
        windows = shape.window_layers * shape.window_kv_heads * shape.window_head_dim
        windows *= self._rows(context, shape.window)
        # A recurrent state is there twice: as it is, and as it was at the last mark.
        # In 8 bits a scale belongs to every row.
        width = 1.0 + 4.0 / shape.head_dim if self.kv_bits == 8 else self.width
        return int(2 * (full + windows) * width) + 2 * shape.recurrent_bytes

    def _draft_cache(self, context: int) -> int:
        if self.draft is None:
            return 0
        draft, context = self.draft, context + self.draft.block_size
        rows = sum(self._rows(context, window or 0) for window in draft.windows)
        return int(2 * draft.kv_heads * draft.head_dim * rows * self.width)

    def _rows(self, context: int, window: int = 0) -> int:
        """Rows that a layer's buffers hold."""
        if self.backend != "mlx":
            if window:
                return min(context, window - 1 + _TORCH_MARGIN)
            return -(-context // COLUMN_STEP) * COLUMN_STEP if self.device == "cpu" else context
        # They grow by an eighth, and to whole steps; the last growth may just have happened.
        rows = context + context // 8
        if window:
            rows = min(rows, window - 1 + _MLX_MARGIN)
        return -(-rows // _MLX_STEP) * _MLX_STEP

    def _scored(self, context: int) -> int:
        """Columns whose scores the CPU holds for all rows."""
        if not cpu_fuses(half=True) or self.kv_bits == 8 or self.shape.head_dim % _FUSED_STEP:
            return context
        return self._rows(context, self.shape.window) if self.shape.window_layers else 0

    def _workspace(self, context: int) -> int:
        shape, step = self.shape, min(PREFILL_SLICE, context)
        taps = len(self.draft.target_layer_ids) if self.draft else 0
        rows = 2 * self.draft.block_size if self.draft else 1  # a tree has so many
        row = 2 * (shape.inner or 3 * shape.hidden) + (6 + 2 * taps) * shape.hidden
        heads = shape.heads or max(1, shape.hidden // shape.head_dim)
        if self.backend == "torch":
            # An additive mask, its repeats per query head, and one of bools.
            groups = max(1, heads // shape.kv_heads)
            masks = ((groups + 1) * self.width + 1) * step * context
            # In half precision the CPU's scores and what they become; in fp32 where it widens them.
            if self.device == "cpu" and self.width == 2:
                each = 6 if cpu_bf16() else 8
                masks += each * min(heads * step * self._scored(context), SCORES_AT_ONCE)
        elif self.device == "metal" and shape.head_dim in _FUSED_HEAD_DIMS:
            masks = 0
        else:  # one layer's scores, and a mask of bools
            masks = (heads * self.width + 1) * step * context
        if self.kv_bits == 8:  # one layer's rows, spelled out
            masks += 2 * shape.kv_heads * shape.head_dim * context * self.width
        return int(masks + step * row * self.width + 2 * rows * (shape.vocab or 152_000) * 4)
