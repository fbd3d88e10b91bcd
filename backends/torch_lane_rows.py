"""K and V as the CPU's vectors read them: nothing is repacked, however long the context."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .torch_attention import column_step
from .torch_kv_rows import KvMaker, Place, PlainRows, Shape
from .torch_lane_attention import STEP
from .torch_linear import tensor_bytes
from .torch_machine_code import Code, Entry, Lanes, lanes_of


class LaneRows:
    """Rows in a buffer that is ready to be multiplied; a lane is a pair in bf16, a number in fp32.

    A score sums over a head's numbers, so a lane of K has numbers of one row, and vectors have
    rows side by side: ``[1, kv_heads, rows / lanes, dim / each, lanes, each]``. An output sums
    over rows, so a lane of V has those: ``[1, kv_heads, rows / each, dim, each]``.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, cleared: bool
    ) -> None:
        lanes = lanes_of(dtype)
        assert lanes is not None
        assert fits(shape[3], dtype, device)
        one, heads, rows, self._dim = shape
        self._lanes, self._room = lanes, -(-rows // STEP) * STEP
        make = torch.zeros if cleared else torch.empty
        blocks, parts = self._room // lanes.count, self._dim // lanes.each
        self._keys = make((one, heads, blocks, parts, lanes.count, lanes.each), dtype=dtype)
        self._values = make(
            (one, heads, self._room // lanes.each, self._dim, lanes.each), dtype=dtype
        )
        self._zero = torch.zeros((1, 1, 1, self._dim), dtype=dtype)

    @property
    def bytes(self) -> int:
        """Both buffers."""
        return tensor_bytes(self._keys, self._values)

    def write(self, place: Place, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Spread the rows over their lanes."""
        self._copy(place, keys, values, inward=True)

    def read(self, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Views, of whole steps."""
        if place.start % STEP or place.stop % STEP or place.stop > self._room:
            raise ValueError(f"rows {place} of {self._room} in steps of {STEP}")
        count, each = self._lanes.count, self._lanes.each
        keys = self._keys[:, :, place.start // count : place.stop // count]
        return keys, self._values[:, :, place.start // each : place.stop // each]

    def hold(self, rows: int, kept: int) -> None:
        """In place."""
        zeros = self._zero.expand(1, self._keys.shape[1], rows - kept, -1)
        self.write(slice(kept, rows), zeros, zeros)

    def move(self, start: int, end: int) -> None:
        """Through a copy."""
        self.write(slice(0, end - start), *self.taken(slice(start, end)))

    def arrange(self, place: Place, order: torch.Tensor) -> None:
        """Through a copy."""
        assert isinstance(place, slice)
        keys, values = (rows.index_select(2, order) for rows in self.taken(place))
        self.write(slice(place.start, place.start + len(order)), keys, values)

    def taken(self, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as they were computed, ``[1, kv_heads, rows, dim]``."""
        size = (1, self._keys.shape[1], place.stop - place.start, self._dim)
        keys, values = self._keys.new_empty(size), self._keys.new_empty(size)
        self._copy(place, keys, values, inward=False)
        return keys, values

    def _copy(
        self, place: Place, keys: torch.Tensor, values: torch.Tensor, *, inward: bool
    ) -> None:
        # The code below knows nothing of the tensors' ends.
        assert isinstance(place, slice)
        count = place.stop - place.start
        size = (1, self._keys.shape[1], count, self._dim)
        inside = 0 <= place.start <= place.stop <= self._room
        if not inside or not keys.shape == values.shape == size:
            given = f"{tuple(keys.shape)} and {tuple(values.shape)}"
            raise ValueError(f"{given} where {size} lies, at {place} of {self._room}")
        if not keys.dtype == values.dtype == self._keys.dtype:
            raise TypeError(f"rows in {keys.dtype} and {values.dtype} for {self._keys.dtype}")
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        _copier(self._lanes, self._dim, inward)(
            *(self._keys.data_ptr(), self._values.data_ptr(), self._room * self._dim),
            *(keys.data_ptr(), keys.stride(1), keys.stride(2)),
            *(values.data_ptr(), values.stride(1), values.stride(2)),
            *(keys.shape[1], place.start, count),
        )


def fits(dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether heads of that size can lie so, and gain by it."""
    lanes = lanes_of(dtype) if device.type == "cpu" else None
    return lanes is not None and dim % lanes.count == 0


def quickest_rows(
    window: int | None, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[KvMaker, int]:
    """The buffers of a layer whose K/V are kept as computed, and what the columns that are read are
    a multiple of. Lanes are read from the first row on, so a window goes without."""
    if window is None and fits(dim, dtype, device):
        return LaneRows, STEP
    return PlainRows, column_step(dtype, device)


@cache
def _copier(lanes: Lanes, dim: int, inward: bool) -> Entry:
    """Copies rows into the buffers, or out of them."""
    code = Code(
        lanes,
        *("keys", "values", "head_size"),
        *("plain_keys", "key_head", "key_row"),
        *("plain_values", "value_head", "value_row"),
        *("heads", "start", "rows"),
    )
    build, zero, one = code.build, code.count(0), code.count(1)
    count, each = code.count(lanes.count), code.count(lanes.each)

    def copy(name: str, kind: Any, size: int, first: Any, apart: Any) -> None:
        """A row of so many parts, which lie ``apart`` parts from each other in the buffer."""
        head_start = build.mul(head, code["head_size"])
        buffer = code.place(code.address(f"{name}s"), head_start, code.stored)
        start = build.add(
            build.mul(head, code[f"{name}_head"]), build.mul(row, code[f"{name}_row"])
        )
        plain = code.place(code.address(f"plain_{name}s"), start, code.stored)
        with code.each(zero, code.count(size), one) as part:
            there = code.place(buffer, build.add(first, build.mul(part, apart)), kind)
            here = code.place(plain, part, kind)
            source, goal = (here, there) if inward else (there, here)
            code.store(code.load(source, kind), goal)

    with (
        code.each(zero, code["heads"], one) as head,
        code.each(zero, code["rows"], one) as row,
    ):
        at, parts = build.add(code["start"], row), dim // lanes.each
        block = build.mul(build.udiv(at, count), code.count(parts * lanes.count))
        copy("key", code.lane, parts, build.add(block, build.urem(at, count)), count)
        block = build.mul(build.udiv(at, each), code.count(dim * lanes.each))
        copy("value", code.stored, dim, build.add(block, build.urem(at, each)), each)
    return Entry(code)
