"""A draft's context addressed by a length that lives on the device, as a captured graph needs it.

Rows are written by index and read up to a bucket; windowed layers are rings, whose columns know
their positions. So between two buckets no shape and no address changes, and once the bucket
covers every ring none ever does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .torch_attention import additive_mask
from .torch_cache import REACH
from .torch_cache_device import bucket_of
from .torch_draft_context import ContextShape
from .torch_masks import visible_columns


class _Ring:
    """Buffers of the layers that share a window: position p lies at p modulo the room.

    Without a window the room holds every position.
    """

    def __init__(
        self,
        window: int | None,
        layers: Sequence[int],
        shape: ContextShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = list(layers)
        whole = shape.capacity + shape.block
        self.room = whole if window is None else min(whole, window - 1 + REACH + shape.block)
        # Zeros, as masked rows are still multiplied and must not be NaN.
        places = (len(layers), 1, shape.kv_heads, self.room, shape.head_dim)
        self.keys, self.values = (torch.zeros(places, dtype=dtype, device=device) for _ in range(2))
        self.first = 0
        """Position of the oldest row that was not lost."""
        self.first_tensor = torch.zeros(1, dtype=torch.long, device=device)
        self.slots = self.first_tensor[:0]
        """Where the rows begun are written."""

    def crop(self, length: int, reached: int) -> None:
        """Rows that later ones, up to ``reached``, were written over are lost for good."""
        self.first = min(max(self.first, reached - self.room), length)
        self.first_tensor.fill_(self.first)


class DeviceContext:
    """The contract of ``DraftContext`` with one length tensor for all layers.

    Args:
        shape: the numbers of the draft.
    """

    def __init__(self, shape: ContextShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self._block = shape.block
        self._rows = 0
        self._repeats = shape.heads // shape.kv_heads
        self._dtype = dtype
        self._rings = {
            window: _Ring(window, layers, shape, dtype, device)
            for window, layers in shape.layers_by_window.items()
        }
        self._rings_by_layer = {
            layer: (ring, index)
            for ring in self._rings.values()
            for index, layer in enumerate(ring.layers)
        }
        self._most = max(ring.room for ring in self._rings.values())
        self._length_tensor = torch.zeros(1, dtype=torch.long, device=device)
        self._columns = torch.arange(shape.capacity + shape.block, device=device)
        self._positions = self._columns[:0]
        self._bucket = 0

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        buffers = [b for ring in self._rings.values() for b in (ring.keys, ring.values)]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def bucket_for(self, rows: int) -> int:
        """The bucket that ``rows`` rows behind the length fall into."""
        return bucket_of(self.length + rows, self._most)

    def begin(self, rows: int) -> None:
        """Choose the bucket and compute places on the device."""
        self._rows, self._bucket = rows, self.bucket_for(rows)
        self._positions = self._columns[:rows] + self._length_tensor
        for ring in self._rings.values():
            ring.slots = self._positions % ring.room

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """The entries, gathered."""
        return table.index_select(0, self._positions)

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """By index; of more rows than a ring holds the last ones stay."""
        whole = len(self._rings) == 1
        for ring in self._rings.values():
            last = slice(max(0, self._rows - ring.room), None)
            for buffer, rows in ((ring.keys, keys), (ring.values, values)):
                own = rows[last] if whole else rows[last, ring.layers]
                buffer.index_copy_(3, ring.slots[last], own.permute(1, 2, 0, 3)[:, None])

    def peek(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The bucket, or the whole ring."""
        ring, index = self._rings_by_layer[layer]
        keys, values = ring.keys[index], ring.values[index]
        keys.index_copy_(2, ring.slots, key.transpose(0, 1)[None])
        values.index_copy_(2, ring.slots, value.transpose(0, 1)[None])
        return keys[:, :, : self._bucket], values[:, :, : self._bucket]

    def mask(self, window: int | None, *, causal: bool) -> torch.Tensor | None:
        """Never None: there are always columns that do not count."""
        ring = self._rings[window]
        newest = self._length_tensor + (self._rows - 1)
        # The newest position that falls on each column; before the first one nothing was written.
        places = newest - (newest - self._columns[: min(self._bucket, ring.room)]) % ring.room
        distance = self._positions[:, None] - places[None]
        visible = visible_columns(distance, window, causal) & (places >= ring.first_tensor)
        return additive_mask(visible, self._repeats, self._dtype)

    def advance(self, rows: int) -> None:
        """Count rows, on both sides."""
        self.length += rows
        self._length_tensor += rows

    def crop(self, length: int) -> None:
        """Rows that a ring has written over are missing afterwards."""
        if length >= self.length:
            return
        for ring in self._rings.values():
            ring.crop(length, self.length + self._block)
        self.length = length
        self._length_tensor.fill_(length)

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies."""
        ring, index = self._rings_by_layer[layer]
        first = max(ring.first, self.length + self._block - ring.room, 0)
        slots = torch.arange(first, self.length, device=ring.slots.device) % ring.room
        return ring.keys[index, 0][:, slots], ring.values[index, 0][:, slots]
