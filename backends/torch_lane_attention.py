"""Attention over K/V in lanes, fused: scores, weights and sums of a few rows without torch.

The sizes are those of a round: up to twelve rows (of all the query heads that share a K/V head)
over a whole context, which a core reads from memory while it multiplies. A row gives the same
numbers whichever rows it comes with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, reduce
from typing import Any

import torch

from dflash_local.memory_need import COLUMN_STEP

from .torch_machine_code import Code, Entry, Lanes, lanes_of

STEP = COLUMN_STEP
"""Columns come in steps of so many."""

_TILES = {32: (1, 2, 3, 4, 6, 8, 9, 12), 16: (1, 2, 3, 4, 6)}
"""Rows at once, by registers: two vectors of sums for each of the most rows fill them."""
_AHEAD = 32 * 1024
"""Bytes that are asked for before they are read: a core that only waits gets half of what the
memory gives (12 queries over 2,112 rows of 3 heads: 66 us, and 122 without)."""
_PAD = 16
"""Numbers between the rows of scores, as rows at multiples of 4 KB drive each other out."""

_POWERS = {1: 8, 2: 5}
"""Terms for 2^x between -1/2 and 1/2, by the numbers of a lane: in fp32 to 5e-9 of it, in bf16 to
4e-5, a fiftieth of what is rounded off."""


def lane_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of ``[1, heads, rows, dim]`` queries over K/V as ``LaneRows`` has them.

    ``mask`` is ``[rows or more, length]``, 0 or -inf; the query heads share its first ``rows``. All
    are of one type; scores and sums are in fp32, weights are rounded to the type of V. Returns
    ``[1, rows, heads, dim]``.
    """
    _, heads, rows, dim = query.shape
    kv_heads, columns = values.shape[1], values.shape[2] * values.shape[4]
    lanes = lanes_of(query.dtype)
    if mask is None:
        mask = query.new_zeros(1, columns).expand(rows, -1)
    query, mask = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, mask))
    # The code below knows nothing of the tensors' ends.
    if lanes is None or not query.dtype == keys.dtype == values.dtype == mask.dtype:
        raise TypeError(f"attention of {query.dtype} over {keys.dtype} with {mask.dtype}")
    fit = keys.shape[2] * lanes.count == mask.shape[1] == columns and mask.shape[0] >= rows
    if not fit or columns % STEP or dim != values.shape[3] or heads % kv_heads:
        raise ValueError(
            f"attention of {tuple(query.shape)} over {tuple(keys.shape)}, {tuple(values.shape)} "
            f"with a mask of {tuple(mask.shape)}"
        )
    groups = heads // kv_heads
    parts, tile = _parts(groups * rows, lanes)
    threads = min(torch.get_num_threads(), kv_heads * parts)
    own = tile * (columns + _PAD)
    scores = torch.empty(threads * own, dtype=torch.float32)
    out = query.new_empty(1, rows, heads, dim)
    _entry(lanes, tile, dim, scale)(
        *(query.data_ptr(), query.stride(1), query.stride(2)),
        *(keys.data_ptr(), keys.stride(1), values.data_ptr(), values.stride(1)),
        *(mask.data_ptr(), mask.stride(0), out.data_ptr(), scores.data_ptr(), own),
        *(kv_heads, groups, rows, columns),
        threads=threads,
    )
    return out


def prepare(lanes: Lanes, groups: int, dim: int, rows: int) -> None:
    """Make the code for up to so many rows of the usual scale, so that no round waits for it."""
    for tile in {_parts(groups * count, lanes)[1] for count in range(1, rows + 1)}:
        _entry(lanes, tile, dim, dim**-0.5)


def spelled_out(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies ``[1, kv_heads, length, dim]`` of K/V as ``LaneRows`` has them."""
    one, heads, _, dim, _ = values.shape
    turned = keys.transpose(3, 4).reshape(one, heads, -1, dim)
    return turned, values.transpose(3, 4).reshape(one, heads, -1, dim)


def _parts(rows: int, lanes: Lanes) -> tuple[int, int]:
    """How often the code runs for one K/V head, and for how many rows at once."""
    tiles = _TILES[lanes.registers]
    parts = -(-rows // tiles[-1])
    return parts, next(size for size in tiles if size * parts >= rows)


@cache
def _entry(lanes: Lanes, tile: int, dim: int, scale: float) -> Entry:
    return Entry(_Emitter(lanes, tile, dim, scale).code)


class _Emitter:
    """The code for ``tile`` rows at once."""

    def __init__(self, lanes: Lanes, tile: int, dim: int, scale: float) -> None:
        self.tile, self.dim, self.scale = tile, dim, scale
        self.code = code = Code(
            lanes,
            *("query", "query_head", "query_row", "keys", "key_head", "values", "value_head"),
            *("mask", "mask_row", "out", "scores", "own_scores"),
            *("kv_heads", "groups", "rows", "columns"),
        )
        self.queries = code.room(code.row, tile * dim // lanes.count)
        self.masks = code.room(code.whole, tile)
        """Where the mask of a row begins."""
        self.outs = code.room(code.whole, tile)
        self.shares = code.room(code.number, tile)
        """One over the sum of a row's weights."""
        build, zero, one = code.build, code.count(0), code.count(1)
        self.row_size = build.add(code["columns"], code.count(_PAD))
        thread, threads = code.team()
        own = build.mul(thread, code["own_scores"])
        self.scores = code.place(code.address("scores"), own, code.number)
        total = build.mul(code["groups"], code["rows"])
        parts = build.sdiv(build.add(total, code.count(tile - 1)), code.count(tile))
        items = build.mul(code["kv_heads"], parts)
        with code.each(thread, items, threads) as item:
            head = build.sdiv(item, parts)
            first = build.mul(build.srem(item, parts), code.count(tile))
            with code.each(zero, code.count(tile), one) as index:
                # What is too many does the last row again.
                self._take(head, code.least(build.add(first, index), build.sub(total, one)), index)
            self._score(self._head("keys", "key_head", head))
            with code.each(zero, code.count(tile), one) as index:
                self._weigh(index)
            self._sum(self._head("values", "value_head", head))

    def _head(self, name: str, size: str, head: Any) -> Any:
        code = self.code
        return code.place(code.address(name), code.build.mul(head, code[size]), code.stored)

    def _take(self, head: Any, row: Any, index: Any) -> None:
        """Note where the row of a query head lies, and bring its query near."""
        code, build = self.code, self.code.build
        group, row = build.srem(row, code["groups"]), build.sdiv(row, code["groups"])
        query_head = build.add(build.mul(head, code["groups"]), group)
        start = build.add(
            build.mul(query_head, code["query_head"]), build.mul(row, code["query_row"])
        )
        source = code.place(code.address("query"), start, code.stored)
        vectors = self.dim // code.lanes.count
        goal = build.mul(index, code.count(vectors))
        for vector in range(vectors):
            there = code.place(self.queries, build.add(goal, code.count(vector)), code.row)
            code.store(code.load(code.place(source, vector, code.row), code.row), there)
        code.store(build.mul(row, code["mask_row"]), code.place(self.masks, index, code.whole))
        heads = build.mul(code["kv_heads"], code["groups"])
        out = build.mul(build.add(build.mul(row, heads), query_head), code.count(self.dim))
        code.store(out, code.place(self.outs, index, code.whole))

    def _score(self, keys: Any) -> None:
        """Scores of all rows, scaled, as powers of 2, and masked."""
        code, build, lanes = self.code, self.code.build, self.code.lanes
        size, blocks = self.dim // lanes.each, self._blocks(STEP // lanes.count)
        scale = code.all(code.numbers, self.scale * math.log2(math.e))
        with self._columns(blocks * lanes.count) as column:
            here = code.place(keys, build.mul(column, code.count(size)), code.lane)
            sums = self._zeros(blocks)
            with code.each(code.count(0), code.count(size), code.count(1)) as lane:
                others = [
                    code.place(self.queries, build.add(lane, code.count(row * size)), code.lane)
                    for row in range(self.tile)
                ]
                first = build.mul(lane, code.count(lanes.count))
                self._add(sums, code.place(here, first, code.lane), lanes.count * size, others)
            for row, own in enumerate(sums):
                start = code.load(code.place(self.masks, row, code.whole), code.whole)
                for block, total in enumerate(own):
                    at = build.add(column, code.count(block * lanes.count))
                    place = code.place(code.address("mask"), build.add(start, at), code.stored)
                    masked = build.fadd(
                        build.fmul(total.value, scale), code.opened(code.load(place, code.row))
                    )
                    code.store(masked, code.place(self._row(row), at, code.number))

    def _weigh(self, row: Any) -> None:
        """Scores become weights as V is stored, at the front of their row."""
        code, build, lanes = self.code, self.code.build, self.code.lanes
        scores, some = self._row(row), range(4)  # chains that need not wait for each other
        largest = [code.variable(code.all(code.numbers, -3e38)) for _ in some]
        totals = [code.variable(code.all(code.numbers, 0.0)) for _ in some]

        def columns() -> Iterator[tuple[int, Any, Any]]:
            with self._columns(len(some) * lanes.count) as first:
                for index in some:
                    column = build.add(first, code.count(lanes.count * index))
                    place = code.place(scores, column, code.number)
                    yield index, column, code.load(place, code.numbers)

        for index, _, score in columns():
            largest[index].value = code.larger(largest[index].value, score)
        most = reduce(code.larger, [one.value for one in largest])
        most = code.spread(code.over_numbers("fmax", most))
        for index, column, score in columns():
            weight = self._exp2(build.fsub(score, most))
            totals[index].value = build.fadd(totals[index].value, weight)
            code.store(code.closed(weight), code.place(scores, column, code.stored))
        total = reduce(build.fadd, [one.value for one in totals])
        whole = code.over_numbers("fadd", code.number(0.0), total)
        share = build.fdiv(code.number(1.0), whole)
        code.store(share, code.place(self.shares, row, code.number))

    def _exp2(self, numbers: Any) -> Any:
        """2 to the power of what is not above 0; from 2^-127 on 0, as its exponent is then."""
        code, build = self.code, self.code.build
        exponent = code.larger(code.all(code.numbers, -127.0), numbers)
        whole = code.of_numbers("nearbyint", exponent)
        part, power = build.fsub(exponent, whole), None
        for term in reversed(range(_POWERS[code.lanes.each])):
            factor = code.all(code.numbers, math.log(2) ** term / math.factorial(term))
            power = factor if power is None else code.of_numbers("fma", power, part, factor)
        shift = build.shl(build.fptosi(whole, code.vector), code.all(code.vector, 23))
        return build.bitcast(build.add(build.bitcast(power, code.vector), shift), code.numbers)

    def _sum(self, values: Any) -> None:
        """The weighted sums of values, by as many of a head's numbers as the registers take."""
        code, build, lanes = self.code, self.code.build, self.code.lanes
        vectors, zero, one = self.dim // lanes.count, code.count(0), code.count(1)
        blocks = self._blocks(vectors)
        with code.each(zero, code.count(vectors), code.count(blocks)) as vector:
            here = code.place(values, build.mul(vector, code.count(lanes.count)), code.lane)
            sums = self._zeros(blocks)
            each = build.udiv(code["columns"], code.count(lanes.each))
            with code.each(zero, each, one) as lane:
                others = [code.place(self._row(row), lane, code.lane) for row in range(self.tile)]
                line = code.place(here, build.mul(lane, code.count(self.dim)), code.lane)
                self._add(sums, line, lanes.count, others)
            for row, own in enumerate(sums):
                share = code.load(code.place(self.shares, row, code.number), code.number)
                start = code.load(code.place(self.outs, row, code.whole), code.whole)
                for block, total in enumerate(own):
                    at = build.mul(build.add(vector, code.count(block)), code.count(lanes.count))
                    there = code.place(code.address("out"), build.add(start, at), code.stored)
                    code.store(code.closed(build.fmul(total.value, code.spread(share))), there)

    def _add(self, sums: Any, line: Any, apart: int, others: Any) -> None:
        """To every row's sums the products of its lane with vectors that lie so many lanes
        apart."""
        code = self.code
        vectors = []
        for block in range(len(sums[0])):
            place = code.place(line, block * apart, code.lane)
            vectors.append(code.load(place, code.vector))
            code.fetch(code.place(place, _AHEAD // 4, code.lane))
        for own, place in zip(sums, others, strict=True):
            other = code.spread(code.load(place, code.lane))
            for total, vector in zip(own, vectors, strict=True):
                total.value = code.add_products(total.value, vector, other)

    def _blocks(self, most: int) -> int:
        """Vectors of sums for each row: the registers hold them, what is added and a lane."""
        fits = (n for n in (4, 2, 1) if self.tile * n + n + 1 <= self.code.lanes.registers)
        return next(n for n in fits if most % n == 0)

    def _zeros(self, blocks: int) -> Any:
        code = self.code
        return [
            [code.variable(code.all(code.numbers, 0.0)) for _ in range(blocks)]
            for _ in range(self.tile)
        ]

    def _columns(self, step: int) -> Any:
        """A loop over all columns."""
        code = self.code
        return code.each(code.count(0), code["columns"], code.count(step))

    def _row(self, row: Any) -> Any:
        """A row of scores, and of weights."""
        code = self.code
        at = code.count(row) if isinstance(row, int) else row
        return code.place(self.scores, code.build.mul(at, self.row_size), code.number)
