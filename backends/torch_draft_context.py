"""A draft's context: K and V of the positions before the block, per layer.

Block rows are written behind the context, seen at once and never counted. A layer with a window
keeps what it can still see and a margin; a crop further back than that leaves it with fewer rows,
which costs acceptance for a while and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .torch_attention import additive_mask
from .torch_cache import REACH, SLICE
from .torch_lane_rows import quickest_rows
from .torch_masks import visible_columns


@dataclass(frozen=True, slots=True)
class ContextShape:
    """The numbers that a context depends on."""

    windows: tuple[int | None, ...]
    """Per layer, the rows that a block row sees, itself included; None is all."""
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    """Most rows of a block."""
    capacity: int
    """Context positions to hold."""

    @property
    def layers_by_window(self) -> dict[int | None, list[int]]:
        """Layers that share buffers."""
        groups: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            groups.setdefault(window, []).append(layer)
        return groups


class DraftContext(Protocol):
    """What a draft remembers, and how its block rows see it."""

    @property
    def length(self) -> int:
        """Positions that count."""
        ...

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        ...

    def bucket_for(self, rows: int) -> int | None:
        """What the shapes depend on beside ``rows``; None where they follow the length."""
        ...

    def begin(self, rows: int) -> None:
        """Make room for ``rows`` rows behind ``length``; every write and every block starts so."""
        ...

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """The entries ``[rows, ...]`` of a per-position table for the rows begun."""
        ...

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """K and V of the rows begun for every layer, ``[rows, layers, kv_heads, head_dim]``."""
        ...

    def peek(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put block rows ``[rows, kv_heads, head_dim]`` of one layer behind the context and
        return all that they may see, ``[1, kv_heads, columns, head_dim]``."""
        ...

    def mask(self, window: int | None, *, causal: bool) -> torch.Tensor | None:
        """Additive mask over what ``peek`` returns; None where every row sees every column."""
        ...

    def advance(self, rows: int) -> None:
        """Count the first ``rows`` rows behind ``length``."""
        ...

    def crop(self, length: int) -> None:
        """Forget every position from ``length`` on."""
        ...

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, ``[kv_heads, rows, head_dim]`` in temporal order, for checks."""
        ...


class _Group:
    """Buffers of the layers that share a window, rows in temporal order."""

    def __init__(
        self,
        window: int | None,
        layers: Sequence[int],
        shape: ContextShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = window
        self.layers = list(layers)
        self.base = 0
        """Position of the first row."""
        maker, self._step = quickest_rows(window, shape.head_dim, dtype, device)
        whole = -(-(shape.capacity + shape.block) // self._step) * self._step
        self.room = whole if window is None else min(whole, window - 1 + REACH + SLICE)
        size = (1, shape.kv_heads, self.room, shape.head_dim)
        self.rows = [maker(size, dtype, device, cleared=False) for _ in layers]
        self._clean = 0
        """Rows from the front that may be read."""

    def first_visible(self, length: int) -> int:
        """Position of the oldest row that a block row behind ``length`` can see."""
        return self.base if self.window is None else max(self.base, length - self.window + 1)

    def spare(self, length: int, rows: int) -> int:
        """Columns behind ``rows`` rows that are read with them and masked."""
        end = length + rows
        own = end - self.first_visible(length)
        return min(-own % self._step, self.room - (end - self.base))

    def crop(self, length: int) -> None:
        """Forget rows; from the start on, also what was no number."""
        self.base = min(self.base, length)
        if length == 0:
            self._clean = 0

    def make_room(self, length: int, rows: int) -> None:
        """Move the rows that still matter to the front when the end is reached."""
        if self.window is not None and length + rows - self.base > self.room:
            first = max(self.base, length - (self.window - 1) - REACH)
            for own in self.rows:
                own.move(first - self.base, length - self.base)
            self.base = first
        end = length + rows - self.base + self.spare(length, rows)
        if self._step > 1 and end > self._clean:
            # What is masked is multiplied all the same, so it must be a number.
            for own in self.rows:
                own.hold(end, self._clean)
            self._clean = end


class SlicedContext:
    """Addressed by a length that the host knows: views, no gathers. Cheapest on the CPU.

    Args:
        shape: the numbers of the draft.
    """

    def __init__(self, shape: ContextShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self._rows = 0
        self._repeats = shape.heads // shape.kv_heads
        self._dtype, self._device = dtype, device
        self._groups = [
            _Group(window, layers, shape, dtype, device)
            for window, layers in shape.layers_by_window.items()
        ]
        self._places = {
            layer: (group, rows)
            for group in self._groups
            for layer, rows in zip(group.layers, group.rows, strict=True)
        }

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        return sum(rows.bytes for group in self._groups for rows in group.rows)

    def bucket_for(self, rows: int) -> None:
        """Shapes follow the length."""

    def begin(self, rows: int) -> None:
        """Make room in windowed layers."""
        self._rows = rows
        for group in self._groups:
            group.make_room(self.length, rows)

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """A view of the table."""
        return table[self.length : self.length + self._rows]

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Layer by layer."""
        for layer, (key, value) in enumerate(zip(keys.unbind(1), values.unbind(1), strict=True)):
            self._write(layer, key, value)

    def peek(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views from the oldest visible row to the block's last."""
        self._write(layer, key, value)
        group, rows = self._places[layer]
        first, end = group.first_visible(self.length), self.length + self._rows
        end += group.spare(self.length, self._rows)
        return rows.read(slice(first - group.base, end - group.base))

    def mask(self, window: int | None, *, causal: bool) -> torch.Tensor | None:
        """None also while a window holds everything."""
        group = next(g for g in self._groups if g.window == window)
        first, end = group.first_visible(self.length), self.length + self._rows
        spare = group.spare(self.length, self._rows)
        if not spare and not causal and (window is None or end - first <= window):
            return None
        queries = torch.arange(self.length, end, device=self._device)[:, None]
        places = torch.arange(first, end + spare, device=self._device)[None]
        visible = visible_columns(queries - places, window, causal) & (places < end)
        return additive_mask(visible, self._repeats, self._dtype)

    def advance(self, rows: int) -> None:
        """Count rows."""
        self.length += rows

    def crop(self, length: int) -> None:
        """Rows that a window has dropped are missing afterwards."""
        self.length = min(self.length, length)
        for group in self._groups:
            group.crop(self.length)

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views, or copies of what lies otherwise."""
        group, rows = self._places[layer]
        count = self.length - group.base
        keys, values = rows.taken(slice(0, count))
        return keys[0], values[0]

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Rows ``[rows, kv_heads, head_dim]`` of one layer, behind the context."""
        group, rows = self._places[layer]
        start = self.length - group.base
        key, value = (new.transpose(0, 1)[None].to(self._dtype) for new in (key, value))
        rows.write(slice(start, start + self._rows), key, value)
