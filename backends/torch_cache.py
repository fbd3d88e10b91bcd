"""Preallocated K/V: written in place, cropped by a number, never concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from dflash_local.branches import in_place

from .torch_attention import additive_mask, column_step
from .torch_kv_rows import KvMaker, KvRows, PlainRows
from .torch_lane_rows import quickest_rows
from .torch_masks import band_visible, tree_visible
from .torch_recurrent import RecurrentStates
from .torch_tree import Tree

SLICE = 512
"""Most rows of one forward: windowed layers leave room for as many behind their window."""

REACH = 256
"""Rows before the window that a windowed layer keeps at least, so that short rewinds reach."""

_CACHED_ROWS = 32
"""Up to this many rows a forward's masks are views of a matrix that is made once."""


class LayerRows(Protocol):
    """The numbers of a layer that its K/V depend on."""

    @property
    def window(self) -> int | None:
        """Rows that a query sees, itself included; None is all."""
        ...

    @property
    def kv_heads(self) -> int:
        """Heads of K and V."""
        ...

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        ...

    @property
    def stored(self) -> bool:
        """Whether the layer keeps K/V of its own."""
        ...


class TargetCache(Protocol):
    """What a target remembers of the rows that it saw.

    A forward writes its rows behind ``length`` and sees them at once; ``advance`` makes them
    part of the cache, so forgetting a failed forward is doing nothing.
    """

    @property
    def length(self) -> int:
        """Positions that count."""
        ...

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        ...

    def bucket_for(self, rows: int) -> int | None:
        """What a forward's shapes depend on beside ``rows``; None where they follow the length."""
        ...

    @property
    def branching(self) -> bool:
        """Whether the rows begun may be a tree's."""
        ...

    def begin(self, rows: int, tree: Tree | None = None) -> None:
        """Make room for ``rows`` rows behind ``length``; every forward starts with it.

        Rows follow each other, or are a tree's: then a row stands as deep as it lies in the tree,
        and sees its ancestors among them.
        """
        ...

    def arrange(self, order: torch.Tensor) -> None:
        """Bring the rows written last into this order, so that ``advance`` keeps the first.

        On the device, where rows lie at fixed addresses; else ``gather`` does it.
        """
        ...

    def gather(self, rows: Sequence[int]) -> None:
        """Bring these rows, of those written last, to the front: once the host knows them."""
        ...

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """The entries ``[rows, ...]`` of a per-position table for the rows begun."""
        ...

    def mask(self, window: int | None, groups: int) -> torch.Tensor | None:
        """Additive mask ``[groups * rows, columns]`` over what ``update`` returns.

        None where every row sees every column.
        """
        ...

    def columns(self, window: int | None) -> int:
        """Rows of K/V that ``update`` returns for the rows begun."""
        ...

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new rows and return what its queries may see.

        The shapes are ``[1, kv_heads, rows, dim]``; transformers calls it too.
        """
        ...

    def advance(self, rows: int) -> None:
        """Make the first ``rows`` rows behind ``length`` part of the cache."""
        ...

    def mark(self) -> None:
        """Remember this length as one that ``crop`` reaches; the mark before is forgotten."""
        ...

    def crop(self, length: int) -> int:
        """Go back to at most ``length`` positions, and say where it got to."""
        ...


class SlicedCache:
    """K and V of every layer, addressed by a length that the host knows: views, no gathers.

    A windowed layer holds its window, a slice and a margin in temporal order; when it is full
    the rows that still matter move to the front. So any crop within the margin is exact, also
    after the window was passed, and one that goes further back restarts from nothing.

    Args:
        layers: the numbers of every layer.
        capacity: positions to hold.
        recurrent: the states of layers that keep no rows.
        rows: makes the buffers of a layer.
    """

    def __init__(
        self,
        layers: Sequence[LayerRows],
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recurrent: RecurrentStates | None = None,
        rows: KvMaker = PlainRows,
    ) -> None:
        self.recurrent = recurrent
        self._length = 0
        self._rows = 0
        self._tree: Tree | None = None
        self._dtype, self._device = dtype, device
        self.windows = tuple(layer.window for layer in layers)
        self._stored = tuple(layer.stored for layer in layers)
        self._base = dict.fromkeys(self.windows, 0)
        """Per window, the position of the first row in the buffers."""
        own = (rows, column_step(dtype, device))
        chosen = [
            quickest_rows(x.window, x.head_dim, dtype, device) if rows is PlainRows else own
            for x in layers
        ]
        self._step = dict.fromkeys(self.windows, 1)
        """Per window, what the columns that are read are a multiple of."""
        for window, (_, step) in zip(self.windows, chosen, strict=True):
            self._step[window] = max(self._step[window], step)
        whole = self._step.get(None, 1)
        capacity = -(-capacity // whole) * whole
        self._room = {window: buffer_rows(window, capacity) for window in self.windows}
        self._held = dict.fromkeys(self.windows, 0)
        """Per window, how many rows from the front of the buffers may be read."""
        self._layers = [
            maker(
                (1, layer.kv_heads, self._room[layer.window] * layer.stored, layer.head_dim),
                dtype,
                device,
                cleared=False,
            )
            for layer, (maker, _) in zip(layers, chosen, strict=True)
        ]
        self._positions = torch.arange(capacity, device=device)
        self._bands: dict[tuple[int | None, int, int], torch.Tensor] = {}

    @property
    def length(self) -> int:
        """Positions that count."""
        return self._length

    @property
    def bytes(self) -> int:
        """Size of the buffers and of recurrent states."""
        own = sum(layer.bytes for layer in self._layers)
        return own + (self.recurrent.bytes if self.recurrent else 0)

    def bucket_for(self, rows: int) -> None:
        """Shapes follow the length."""

    @property
    def branching(self) -> bool:
        """Recurrent states go through rows one behind the other."""
        return self.recurrent is None

    def begin(self, rows: int, tree: Tree | None = None) -> None:
        """Make room; windowed rows move to the front when they reach the end."""
        self._rows, self._tree = rows, tree
        for window, base in self._base.items():
            if window is not None and self._length + rows - base > self._room[window]:
                first = self._length - (window - 1) - REACH
                for layer in self._layers_of(window):
                    layer.move(first - base, self._length - base)
                self._base[window] = first
            if self._step[window] > 1:
                self._hold(window)

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """A view of the table, unless the rows are a tree's."""
        if self._tree is not None:
            return table[self._length :].index_select(0, self._tree.depths)
        return table[self._length : self._length + self._rows]

    @property
    def positions(self) -> torch.Tensor:
        """Positions ``[rows]`` of the rows begun."""
        return self.take(self._positions)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows; what comes back begins at the first row that any of them sees."""
        window = self.windows[layer_idx]
        base = self._base[window]
        start = self._length - base
        end = start + self._rows
        first = self._length - self._past(window) - base
        layer = self._layers[layer_idx]
        layer.write(slice(start, end), key_states, value_states)
        return layer.read(slice(first, end + self._spare(window)))

    def mask(self, window: int | None, groups: int) -> torch.Tensor | None:
        """A part of a band that is made once for each number of rows; None where one row sees all
        columns."""
        rows, past, spare = self._rows, self._past(window), self._spare(window)
        if rows == 1 and spare == 0:
            return None
        if self._tree is not None:
            return self._additive(tree_visible(self._tree, past, spare, window), groups)
        if rows > _CACHED_ROWS:
            return self._additive(band_visible(rows, past, spare, window, self._device), groups)
        longest = len(self._positions) if window is None else window - 1
        key = (window, groups, rows)
        band = self._bands.get(key)
        if band is None:
            visible = band_visible(rows, longest, self._step[window], window, self._device)
            band = self._bands[key] = self._additive(visible, groups)
        return band[:, longest - past : longest + rows + spare]

    def columns(self, window: int | None) -> int:
        """The visible past, the new rows and what makes the number round."""
        return self._past(window) + self._rows + self._spare(window)

    def arrange(self, order: torch.Tensor) -> None:
        """Nothing yet: most rows need not move, and the host will know which."""

    def gather(self, rows: Sequence[int]) -> None:
        """Through a copy of those that are not in place."""
        first = in_place(rows)
        if first == len(rows):
            return
        order = torch.tensor(rows[first:], device=self._device) - first
        for index, window in enumerate(self.windows):
            start = self._length - self._base[window]
            if self._stored[index]:
                place = slice(start + first, start + self._rows)
                self._layers[index].arrange(place, order)

    def advance(self, rows: int) -> None:
        """Make rows count."""
        if self.recurrent is not None:
            self.recurrent.keep(rows, self._rows)
        self._length += rows

    def mark(self) -> None:
        """Recurrent states are copied; K/V rows can be cropped anyway."""
        if self.recurrent is not None:
            self.recurrent.mark(self._length)

    def crop(self, length: int) -> int:
        """Exact for full layers; windowed ones must still hold the window before ``length``, and
        recurrent ones only reach the mark."""
        length = min(self._length, length)
        if self.recurrent is not None and length < self._length:
            length = self.recurrent.reach(length)
        for window, base in self._base.items():
            if window is not None and base and length - (window - 1) < base:
                length = 0
        if length == 0:
            self._base = dict.fromkeys(self._base, 0)
            self._held = dict.fromkeys(self._held, 0)  # what was no number is forgotten too
        if self.recurrent is not None and length < self._length:
            self.recurrent.go_back(length)
        self._length = length
        return length

    # What recurrent layers of transformers ask of a cache.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The convolution's window; None before the first row."""
        return None if self.recurrent is None else self.recurrent.get_conv_state(layer_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The matrix state; None before the first row."""
        return None if self.recurrent is None else self.recurrent.get_recurrent_state(layer_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, **kwargs: object
    ) -> torch.Tensor:
        """See ``RecurrentStates``."""
        assert self.recurrent is not None
        return self.recurrent.update_conv_state(conv_states, layer_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: object
    ) -> torch.Tensor:
        """See ``RecurrentStates``."""
        assert self.recurrent is not None
        return self.recurrent.update_recurrent_state(recurrent_states, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: a forward must not change the window in place."""
        return True

    def _past(self, window: int | None) -> int:
        """Earlier positions that the rows begun see together."""
        return self._length if window is None else min(self._length, window - 1)

    def _additive(self, visible: torch.Tensor, groups: int) -> torch.Tensor:
        return additive_mask(visible, groups, self._dtype)

    def _layers_of(self, window: int | None) -> list[KvRows]:
        own = enumerate(self.windows)
        return [self._layers[i] for i, w in own if w == window and self._stored[i]]

    def _spare(self, window: int | None) -> int:
        """Columns behind the rows begun that are read with them and masked."""
        step = self._step[window]
        if step == 1:
            return 0
        end = self._length + self._rows - self._base[window]
        return min(-(self._past(window) + self._rows) % step, self._room[window] - end)

    def _hold(self, window: int | None) -> None:
        """What is masked is multiplied all the same, so it must be a number."""
        start, held = self._length - self._base[window], self._held[window]
        needed = start + self._rows + self._spare(window)
        if held < needed:
            for layer in self._layers_of(window):
                layer.hold(needed, min(start, held))
            self._held[window] = needed


def buffer_rows(window: int | None, capacity: int) -> int:
    """Rows that a layer's buffers hold."""
    return capacity if window is None else min(capacity, window - 1 + REACH + SLICE)
