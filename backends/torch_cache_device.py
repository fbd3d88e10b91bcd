"""K/V addressed by a length that lives on the device, as a captured graph needs it.

Rows are written by index and read up to a bucket, so that between two buckets no shape and no
address changes; what lies behind the length is masked. On the CPU, where nothing is captured,
views of the rows that count are cheaper: see ``SlicedCache``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .torch_attention import additive_mask
from .torch_cache import LayerRows
from .torch_kv_rows import KvMaker, PlainRows
from .torch_tree import Tree

FIRST_BUCKET = 512


def bucket_of(rows: int, capacity: int) -> int:
    """The least bucket that holds ``rows`` rows: 512, 1,024, 2,048 and so on."""
    bucket = FIRST_BUCKET
    while bucket < rows:
        bucket *= 2
    return min(bucket, capacity)


class DeviceCache:
    """The contract of ``TargetCache`` with one length tensor for all layers.

    Windowed layers hold every row and read theirs through the mask, so that any crop is exact.

    Args:
        layers: the numbers of every layer.
        capacity: positions to hold.
        rows: makes the buffers of a layer.
    """

    def __init__(
        self,
        layers: Sequence[LayerRows],
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rows: KvMaker = PlainRows,
    ) -> None:
        self.bucket = 0
        """Rows of K/V that the forward begun reads."""
        self._length = 0
        self._capacity = capacity
        self._dtype = dtype
        self._length_tensor = torch.zeros(1, dtype=torch.long, device=device)
        self._places = torch.arange(capacity, device=device)
        self._slots = self._positions = self._places[:0]
        """Where the rows begun are written, and where they stand."""
        self._tree: Tree | None = None
        self.windows = tuple(layer.window for layer in layers)
        # Zeros, as masked rows are still multiplied and must not be NaN.
        self._layers = [
            rows((1, layer.kv_heads, capacity, layer.head_dim), dtype, device, cleared=True)
            for layer in layers
        ]

    @property
    def length(self) -> int:
        """Positions that count, as the host knows them."""
        return self._length

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        return sum(layer.bytes for layer in self._layers)

    def bucket_for(self, rows: int) -> int:
        """The bucket that ``rows`` rows behind the length fall into."""
        return bucket_of(self._length + rows, self._capacity)

    @property
    def branching(self) -> bool:
        """Every layer keeps rows."""
        return True

    def begin(self, rows: int, tree: Tree | None = None) -> None:
        """Choose the bucket and compute the positions on the device."""
        self.bucket, self._tree = self.bucket_for(rows), tree
        self._slots = self._positions = self._places[:rows] + self._length_tensor
        if tree is not None:
            self._positions = tree.depths + self._length_tensor

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """The entries, gathered."""
        return table.index_select(0, self._positions)

    def mask(self, window: int | None, groups: int) -> torch.Tensor | None:
        """Never None: the bucket always holds rows that do not count."""
        places, positions = self._places[: self.bucket][None], self._positions[:, None]
        tree = self._tree
        if tree is None:
            visible = places <= positions
        else:
            visible = (places < self._length_tensor).expand(len(tree.ids), -1).clone()
            visible.index_copy_(1, self._slots, tree.sees)
            places = places.index_copy(1, self._slots, self._positions[None])
        if window is not None:
            visible &= positions - places < window
        return additive_mask(visible, groups, self._dtype)

    def columns(self, window: int | None) -> int:
        """The bucket."""
        return self.bucket

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows by index; what comes back is the bucket."""
        layer = self._layers[layer_idx]
        layer.write(self._slots, key_states, value_states)
        return layer.read(slice(0, self.bucket))

    def arrange(self, order: torch.Tensor) -> None:
        """By index."""
        for layer in self._layers:
            layer.arrange(self._slots, order)

    def gather(self, rows: Sequence[int]) -> None:
        """Nothing: they were arranged."""

    def advance(self, rows: int) -> None:
        """Make rows count, on both sides."""
        self._length += rows
        self._length_tensor += rows

    def mark(self) -> None:
        """Any length can be reached."""

    def crop(self, length: int) -> int:
        """Exact at any length."""
        self._length = min(self._length, length)
        self._length_tensor.fill_(self._length)
        return self._length
