"""K and V of one layer, as computed or in 8 bits; caches decide which rows count."""

from __future__ import annotations

from typing import Protocol

import torch

from .torch_attention import empty_keys
from .torch_linear import tensor_bytes

Place = slice | torch.Tensor
"""Rows one behind the other, or their indices on the device."""

Shape = tuple[int, int, int, int]
"""``[1, kv_heads, rows, dim]``."""


class KvRows(Protocol):
    """Buffers of ``[1, kv_heads, rows, dim]``; rows that nobody wrote are finite or never read."""

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        ...

    def write(self, place: Place, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows ``[1, kv_heads, rows, dim]``."""
        ...

    def read(self, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored rows, for attention."""
        ...

    def taken(self, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored rows ``[1, kv_heads, rows, dim]``, however they lie."""
        ...

    def hold(self, rows: int, kept: int) -> None:
        """Have ``rows`` rows that may be read: the first ``kept`` as they are, zeros behind."""
        ...

    def move(self, start: int, end: int) -> None:
        """Bring rows ``start`` to ``end`` to the front."""
        ...

    def arrange(self, place: Place, order: torch.Tensor) -> None:
        """Bring rows of a place, numbered from its start, to its front."""
        ...


class KvMaker(Protocol):
    """Makes the buffers of a layer; ``cleared`` ones hold zeros."""

    def __call__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, cleared: bool
    ) -> KvRows:
        """Buffers for rows that attention wants in ``dtype``."""
        ...


class PlainRows:
    """Rows as they were computed, read as views."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, cleared: bool
    ) -> None:
        # Uninitialised pages that no row reached yet cost nothing on the CPU.
        self._buffers = (
            empty_keys(shape, dtype, device),
            torch.empty(shape, dtype=dtype, device=device),
        )
        if cleared:
            for buffer in self._buffers:
                buffer.zero_()

    @property
    def bytes(self) -> int:
        """Both buffers."""
        return tensor_bytes(*self._buffers)

    def write(self, place: Place, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy."""
        for buffer, rows in zip(self._buffers, (keys, values), strict=True):
            _put(buffer, place, rows)

    def read(self, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Views."""
        keys, values = self._buffers
        return keys[:, :, place], values[:, :, place]

    def taken(self, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Views."""
        return self.read(place)

    def hold(self, rows: int, kept: int) -> None:
        """In place."""
        for buffer in self._buffers:
            buffer[:, :, kept:rows] = 0

    def move(self, start: int, end: int) -> None:
        """Through a copy, as the places may overlap."""
        for buffer in self._buffers:
            buffer[:, :, : end - start] = buffer[:, :, start:end].clone()

    def arrange(self, place: Place, order: torch.Tensor) -> None:
        """Through a copy."""
        for buffer in self._buffers:
            _put(buffer, _front(place, len(order)), _rows(buffer, place).index_select(2, order))


class Int8Rows:
    """Eight bits per number and a scale per row and head.

    Every row is read back from what was stored, the newest ones too: a row then reads the same
    whichever forward wrote it. Reading spells out the rows of one layer at a time.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, cleared: bool
    ) -> None:
        make = torch.zeros if cleared else torch.empty
        self._buffers = [make(shape, dtype=torch.int8, device=device) for _ in range(2)]
        self._scales = [make((*shape[:3], 1), dtype=dtype, device=device) for _ in range(2)]

    @property
    def bytes(self) -> int:
        """Numbers and scales."""
        return tensor_bytes(*self._buffers, *self._scales)

    def write(self, place: Place, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Round to the nearest of 255 steps."""
        for buffer, scales, rows in zip(self._buffers, self._scales, (keys, values), strict=True):
            # The scale is rounded first, so that rows are divided by what they are multiplied by.
            largest = rows.abs().amax(dim=-1, keepdim=True).float().clamp_(min=1e-6)
            scale = (largest / 127.0).to(scales.dtype)
            steps = (rows.float() / scale.float()).round_().clamp_(-127, 127)
            _put(buffer, place, steps.to(torch.int8))
            _put(scales, place, scale)

    def read(self, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh tensors."""
        keys, values = (
            buffer[:, :, place] * scales[:, :, place]
            for buffer, scales in zip(self._buffers, self._scales, strict=True)
        )
        return keys, values

    def taken(self, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh tensors."""
        return self.read(place)

    def hold(self, rows: int, kept: int) -> None:
        """In place."""
        for buffer in (*self._buffers, *self._scales):
            buffer[:, :, kept:rows] = 0

    def move(self, start: int, end: int) -> None:
        """Through a copy, as the places may overlap."""
        for buffer in (*self._buffers, *self._scales):
            buffer[:, :, : end - start] = buffer[:, :, start:end].clone()

    def arrange(self, place: Place, order: torch.Tensor) -> None:
        """As they were stored."""
        for buffer in (*self._buffers, *self._scales):
            _put(buffer, _front(place, len(order)), _rows(buffer, place).index_select(2, order))


def kv_maker(bits: int | None) -> KvMaker:
    """The rows for 8 or 16 bits; None is 16."""
    return Int8Rows if bits == 8 else PlainRows


def _front(place: Place, rows: int) -> Place:
    return slice(place.start, place.start + rows) if isinstance(place, slice) else place[:rows]


def _rows(buffer: torch.Tensor, place: Place) -> torch.Tensor:
    return buffer[:, :, place] if isinstance(place, slice) else buffer.index_select(2, place)


def _put(buffer: torch.Tensor, place: Place, rows: torch.Tensor) -> None:
    if isinstance(place, slice):
        buffer[:, :, place] = rows
    else:
        buffer.index_copy_(2, place, rows)
