"""K and V in bf16 as the CPU's products of pairs read them: nothing is repacked, however long."""

from __future__ import annotations

import math
from functools import cache

import torch

from .torch_attention import column_step
from .torch_kv_rows import Place, Shape
from .torch_linear import tensor_bytes
from .torch_machine_code import LANES, Code, Entry, has_machine_code
from .torch_paired_attention import STEP


class PairedRows:
    """Rows in a buffer that is ready to be multiplied.

    A score sums over a head's numbers, so K has pairs of those, of 16 rows side by side:
    ``[1, kv_heads, rows / 16, dim / 2, 16, 2]``. An output sums over rows, so V has pairs of
    those: ``[1, kv_heads, rows / 2, dim, 2]``.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, cleared: bool
    ) -> None:
        assert fits(shape[3], dtype, device)
        _, heads, rows, self._dim = shape
        self._room = -(-rows // STEP) * STEP
        make = torch.zeros if cleared else torch.empty
        size = (1, heads, self._room // LANES, self._dim // 2, LANES, 2)
        self._keys = make(size, dtype=dtype)
        self._values = make((1, heads, self._room // 2, self._dim, 2), dtype=dtype)
        self._zero = torch.zeros((1, 1, 1, self._dim), dtype=dtype)

    @property
    def bytes(self) -> int:
        """Both buffers."""
        return tensor_bytes(self._keys, self._values)

    def write(self, place: Place, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Spread the rows' pairs."""
        self._copy(place, keys, values, inward=True)

    def read(self, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Views, of whole steps."""
        assert place.start % STEP == place.stop % STEP == 0
        keys = self._keys[:, :, place.start // LANES : place.stop // LANES]
        return keys, self._values[:, :, place.start // 2 : place.stop // 2]

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
        assert isinstance(place, slice)
        assert keys.stride(-1) == values.stride(-1) == 1
        assert 0 <= place.start <= place.stop <= self._room
        assert keys.dtype == values.dtype == torch.bfloat16
        _copier(self._dim, inward)(
            *(self._keys.data_ptr(), self._values.data_ptr(), self._room * self._dim),
            *(keys.data_ptr(), keys.stride(1), keys.stride(2)),
            *(values.data_ptr(), values.stride(1), values.stride(2)),
            *(keys.shape[1], place.start, place.stop - place.start),
        )


def fits(dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether heads of that size can lie so, and gain by it."""
    return column_step(dtype, device) == STEP and dim % LANES == 0 and has_machine_code()


@cache
def _copier(dim: int, inward: bool) -> Entry:
    """Copies rows into the buffers, or out of them."""
    code = Code(
        *("keys", "values", "head_size"),
        *("plain_keys", "key_head", "key_row"),
        *("plain_values", "value_head", "value_row"),
        *("heads", "start", "rows"),
    )
    build, one, lanes = code.build, code.count(1), int(math.log2(LANES))

    def copy(kind: object, paired: object, plain: object) -> None:
        source, goal = (plain, paired) if inward else (paired, plain)
        code.store(code.load(source, kind), goal)

    with code.each(code.count(0), code["heads"], one) as head:
        offset = build.mul(head, code["head_size"])
        keys, values = (
            code.place(code.address(name), offset, code.half) for name in ("keys", "values")
        )
        with code.each(code.count(0), code["rows"], one) as row:
            at = build.add(code["start"], row)

            def lying(name: str) -> object:
                """The row as it was computed."""
                part = build.add(
                    build.mul(head, code[f"{name}_head"]), build.mul(row, code[f"{name}_row"])
                )
                return code.place(code.address(f"plain_{name}s"), part, code.half)

            block = build.mul(build.lshr(at, code.count(lanes)), code.count(LANES * dim // 2))
            first = build.add(block, build.and_(at, code.count(LANES - 1)))
            with code.each(code.count(0), code.count(dim // 2), one) as pair:
                there = build.add(first, build.mul(pair, code.count(LANES)))
                there, here = (
                    code.place(keys, there, code.pair),
                    code.place(lying("key"), pair, code.pair),
                )
                copy(code.pair, there, here)
            first = build.add(
                build.mul(build.lshr(at, one), code.count(2 * dim)), build.and_(at, one)
            )
            with code.each(code.count(0), code.count(dim), one) as index:
                there = build.add(first, build.shl(index, one))
                there, here = (
                    code.place(values, there, code.half),
                    code.place(lying("value"), index, code.half),
                )
                copy(code.half, there, here)
    return Entry(code)
