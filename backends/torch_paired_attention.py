"""Attention over K/V in pairs, fused: scores, weights and sums of a few rows without torch.

The sizes are those of a round: up to twelve rows (of all the query heads that share a K/V head)
over a whole context, which a core reads from memory while it multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, reduce
from typing import Any

import torch

from .torch_machine_code import LANES, Code, Entry

STEP = 64
"""Columns come in steps of so many."""

_TILES = (1, 2, 3, 4, 6, 8, 9, 12)
"""Rows at once. Twelve keep 24 sums of 16 numbers in the 32 registers."""
_SUMS = 24
_AHEAD = 32 * 1024
"""Bytes that are asked for before they are read: a core that only waits gets half of what the
memory gives (12 queries over 2,112 rows of 3 heads: 66 us, and 122 without)."""
_PAD = 16
"""Numbers between the rows of scores, as rows at multiples of 4 KB drive each other out."""

_EXP2 = [math.log(2) ** power / math.factorial(power) for power in range(5)]
"""2^x between -1/2 and 1/2, to 4e-5 of it, a fiftieth of what bf16 rounds off."""


def paired_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of ``[1, heads, rows, dim]`` queries in bf16 over K/V as ``PairedRows`` has them.

    ``mask`` is additive, ``[rows or more, length]``, in bf16; the query heads share its first
    ``rows``. Scores and sums are in fp32, the weights are rounded to bf16, as K and V are. Returns
    ``[1, rows, heads, dim]``.
    """
    _, heads, rows, dim = query.shape
    kv_heads, columns = values.shape[1], 2 * values.shape[2]
    if mask is None:
        mask = query.new_zeros(1, columns).expand(rows, -1)
    if query.stride(-1) != 1:
        query = query.contiguous()
    assert query.dtype == mask.dtype == torch.bfloat16
    assert mask.shape[0] >= rows
    assert mask.shape[1] == columns
    assert mask.stride(1) == 1
    assert columns % STEP == 0
    groups = heads // kv_heads
    parts, tile = _parts(groups * rows)
    threads = min(torch.get_num_threads(), kv_heads * parts)
    own = tile * (columns + _PAD)
    scores = torch.empty(threads * own, dtype=torch.float32)
    out = query.new_empty(1, rows, heads, dim)
    _entry(tile, dim, scale)(
        *(query.data_ptr(), query.stride(1), query.stride(2)),
        *(keys.data_ptr(), keys.stride(1), values.data_ptr(), values.stride(1)),
        *(mask.data_ptr(), mask.stride(0), out.data_ptr(), scores.data_ptr(), own),
        *(kv_heads, groups, rows, columns, threads),
        threads=threads,
    )
    return out


def prepare(groups: int, dim: int, rows: int) -> None:
    """Make the code for up to so many rows of the usual scale, so that no round waits for it."""
    for tile in {_parts(groups * count)[1] for count in range(1, rows + 1)}:
        _entry(tile, dim, dim**-0.5)


def spelled_out(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies ``[1, kv_heads, length, dim]`` of K/V as ``PairedRows`` has them."""
    one, heads, _, dim, _ = values.shape
    turned = keys.transpose(3, 4).reshape(one, heads, -1, dim)
    return turned, values.transpose(3, 4).reshape(one, heads, -1, dim)


def _parts(rows: int) -> tuple[int, int]:
    """How often the code runs for one K/V head, and for how many rows at once."""
    parts = -(-rows // _TILES[-1])
    return parts, next(size for size in _TILES if size * parts >= rows)


@cache
def _entry(tile: int, dim: int, scale: float) -> Entry:
    return Entry(_Emitter(tile, dim, scale).code)


class _Emitter:
    """The code for ``tile`` rows at once."""

    def __init__(self, tile: int, dim: int, scale: float) -> None:
        self.tile, self.dim, self.scale = tile, dim, scale
        self.code = code = Code(
            *("query", "query_head", "query_row", "keys", "key_head", "values", "value_head"),
            *("mask", "mask_row", "out", "scores", "own_scores"),
            *("kv_heads", "groups", "rows", "columns", "threads"),
        )
        self.queries = code.room(code.halves, tile * dim // LANES)
        self.masks = code.room(code.whole, tile)
        """Where the mask of a row begins."""
        self.outs = code.room(code.whole, tile)
        self.shares = code.room(code.number, tile)
        """One over the sum of a row's weights."""
        build, zero, one = code.build, code.count(0), code.count(1)
        self.row_size = build.add(code["columns"], code.count(_PAD))
        thread = code.thread()
        own = build.mul(thread, code["own_scores"])
        self.scores = code.place(code.address("scores"), own, code.number)
        total = build.mul(code["groups"], code["rows"])
        more = build.add(total, code.count(tile - 1))
        parts = build.sdiv(more, code.count(tile))
        items = build.mul(code["kv_heads"], parts)
        with code.each(thread, items, code["threads"]) as item:
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
        return code.place(code.address(name), code.build.mul(head, code[size]), code.half)

    def _take(self, head: Any, row: Any, index: Any) -> None:
        """Note where the row of a query head lies, and bring its query near."""
        code, build = self.code, self.code.build
        group, row = build.srem(row, code["groups"]), build.sdiv(row, code["groups"])
        query_head = build.add(build.mul(head, code["groups"]), group)
        start = build.add(
            build.mul(query_head, code["query_head"]), build.mul(row, code["query_row"])
        )
        source = code.place(code.address("query"), start, code.half)
        vectors = self.dim // LANES
        goal = build.mul(index, code.count(vectors))
        for vector in range(vectors):
            there = code.place(self.queries, build.add(goal, code.count(vector)), code.halves)
            code.store(code.load(code.place(source, vector, code.halves), code.halves), there)
        code.store(build.mul(row, code["mask_row"]), code.place(self.masks, index, code.whole))
        heads = build.mul(code["kv_heads"], code["groups"])
        out = build.mul(build.add(build.mul(row, heads), query_head), code.count(self.dim))
        code.store(out, code.place(self.outs, index, code.whole))

    def _score(self, keys: Any) -> None:
        """Scores of all rows, scaled, as powers of 2, and masked."""
        code, build, pairs = self.code, self.code.build, self.dim // 2
        blocks = 4 if 4 * self.tile <= _SUMS else 2
        scale = code.all(code.numbers, self.scale * math.log2(math.e))
        with code.each(code.count(0), code["columns"], code.count(LANES * blocks)) as column:
            here = code.place(keys, build.mul(column, code.count(pairs)), code.pair)
            sums = self._zeros(blocks)
            with code.each(code.count(0), code.count(pairs), code.count(1)) as pair:
                line = code.place(here, build.mul(pair, code.count(LANES)), code.pair)
                near = [
                    code.place(line, block * LANES * pairs, code.pair) for block in range(blocks)
                ]
                for place in near:
                    code.fetch(code.place(place, _AHEAD // 4, code.pair))
                self._add(
                    sums,
                    near,
                    [
                        code.place(
                            self.queries, build.add(pair, code.count(row * pairs)), code.pair
                        )
                        for row in range(self.tile)
                    ],
                )
            for row, own in enumerate(sums):
                start = code.load(code.place(self.masks, row, code.whole), code.whole)
                for block, total in enumerate(own):
                    at = build.add(column, code.count(LANES * block))
                    place = code.place(code.address("mask"), build.add(start, at), code.half)
                    masked = build.fadd(
                        build.fmul(total.value, scale), code.widened(code.load(place, code.halves))
                    )
                    code.store(masked, code.place(self._row(code.count(row)), at, code.number))

    def _weigh(self, row: Any) -> None:
        """Scores become weights in bf16, at the front of their row."""
        code, build = self.code, self.code.build
        zero, step, scores = code.count(0), code.count(STEP), self._row(row)
        some = range(STEP // LANES)  # chains that need not wait for each other
        largest = [code.variable(code.all(code.numbers, -3e38)) for _ in some]
        totals = [code.variable(code.all(code.numbers, 0.0)) for _ in some]

        def columns() -> Iterator[tuple[int, Any, Any]]:
            with code.each(zero, code["columns"], step) as first:
                for index in some:
                    column = build.add(first, code.count(LANES * index))
                    place = code.place(scores, column, code.number)
                    yield index, column, code.load(place, code.numbers)

        for index, _, score in columns():
            largest[index].value = self._larger(largest[index].value, score)
        most = reduce(self._larger, [one.value for one in largest])
        most = code.spread(code.call("llvm.vector.reduce.fmax.v16f32", code.number, most))
        for index, column, score in columns():
            weight = self._exp2(build.fsub(score, most))
            totals[index].value = build.fadd(totals[index].value, weight)
            code.store(code.rounded(weight), code.place(scores, column, code.half))
        total = reduce(build.fadd, [one.value for one in totals])
        start = code.number(0.0)
        whole = code.call("llvm.vector.reduce.fadd.v16f32", code.number, start, total)
        share = build.fdiv(code.number(1.0), whole)
        code.store(share, code.place(self.shares, row, code.number))

    def _exp2(self, numbers: Any) -> Any:
        """2 to the power of what is not above 0, 2^-126 at least."""
        code, build = self.code, self.code.build
        exponent = self._larger(numbers, code.all(code.numbers, -126.0))
        whole = code.call("llvm.nearbyint.v16f32", code.numbers, exponent)
        part = build.fsub(exponent, whole)
        power = code.all(code.numbers, _EXP2[-1])
        for factor in reversed(_EXP2[:-1]):
            factors = code.all(code.numbers, factor)
            power = code.call("llvm.fma.v16f32", code.numbers, power, part, factors)
        return code.scaled(power, whole)

    def _larger(self, one: Any, other: Any) -> Any:
        build = self.code.build
        return build.select(build.fcmp_ordered(">", one, other), one, other)

    def _sum(self, values: Any) -> None:
        """The weighted sums of values, by as many of a head's numbers as the registers take."""
        code, build = self.code, self.code.build
        vectors = self.dim // LANES
        blocks = max(n for n in (1, 2, 4) if vectors % n == 0 and n * self.tile <= _SUMS)
        with code.each(code.count(0), code.count(vectors), code.count(blocks)) as vector:
            here = code.place(values, build.mul(vector, code.count(LANES)), code.pair)
            sums = self._zeros(blocks)
            half = build.lshr(code["columns"], code.count(1))
            with code.each(code.count(0), half, code.count(1)) as pair:
                line = code.place(here, build.mul(pair, code.count(self.dim)), code.pair)
                near = [code.place(line, block * LANES, code.pair) for block in range(blocks)]
                for place in near:
                    code.fetch(code.place(place, _AHEAD // 4, code.pair))
                self._add(
                    sums,
                    near,
                    [
                        code.place(self._row(code.count(row)), pair, code.pair)
                        for row in range(self.tile)
                    ],
                )
            for row, own in enumerate(sums):
                share = code.spread(
                    code.load(code.place(self.shares, row, code.number), code.number)
                )
                start = code.load(code.place(self.outs, row, code.whole), code.whole)
                for block, total in enumerate(own):
                    at = build.mul(build.add(vector, code.count(block)), code.count(LANES))
                    there = code.place(code.address("out"), build.add(start, at), code.half)
                    code.store(code.rounded(build.fmul(total.value, share)), there)

    def _add(self, sums: Any, near: Any, others: Any) -> None:
        """To every row's sums the products of its pair with the vectors that lie near."""
        code = self.code
        vectors = [code.load(place, code.pairs) for place in near]
        for own, place in zip(sums, others, strict=True):
            other = code.spread(code.load(place, code.pair))
            for total, vector in zip(own, vectors, strict=True):
                total.value = code.add_pairs(total.value, vector, other)

    def _zeros(self, blocks: int) -> Any:
        code = self.code
        return [
            [code.variable(code.all(code.numbers, 0.0)) for _ in range(blocks)]
            for _ in range(self.tile)
        ]

    def _row(self, row: Any) -> Any:
        """A row of scores, and of weights."""
        code = self.code
        return code.place(self.scores, code.build.mul(row, self.row_size), code.number)
