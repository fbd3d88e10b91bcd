"""What the CPU's caches give attention: the rows that count and, masked, what makes their number
round. Whatever was written, advanced and cropped before, only the rows that count show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dflash_local.backends.torch_attention import column_step, folded_attention  # noqa: E402
from dflash_local.backends.torch_cache import SlicedCache  # noqa: E402
from dflash_local.backends.torch_draft_context import ContextShape, SlicedContext  # noqa: E402
from dflash_local.backends.torch_kv_rows import Int8Rows, KvMaker, PlainRows  # noqa: E402

CPU = torch.device("cpu")
HEADS, KV_HEADS, CAPACITY = 4, 2, 400
DIMS = [8, 16]
"""Heads that seldom lie in lanes, and such as do where that gains."""
GROUPS = HEADS // KV_HEADS

Move = tuple[int, int, int]
"""Rows of a forward, how many of them are kept, and how many positions are gone back then."""

moves = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 70), st.integers(0, 90)), min_size=1, max_size=12
)


@dataclass(frozen=True)
class Layer:
    window: int | None
    kv_heads: int = KV_HEADS
    head_dim: int = DIMS[-1]
    stored: bool = True


@pytest.fixture(autouse=True)
def dirty_memory() -> Iterator[None]:
    """Memory that nobody wrote holds no numbers."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def expected(query: Any, rows: Any, window: int | None) -> Any:
    """Attention of the last rows of ``rows`` ``[2, kv_heads, length, dim]``, by the formula."""
    keys, values = rows.float().repeat_interleave(GROUPS, dim=1)
    count, length = query.shape[2], rows.shape[2]
    at = torch.arange(length - count, length)[:, None]
    seen = torch.arange(length) <= at
    if window is not None:
        seen &= at - torch.arange(length) < window
    scores = (query[0].float() @ keys.mT) * 0.3
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1)[None]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("maker", [PlainRows, Int8Rows])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@settings(max_examples=12, deadline=None)
@given(steps=moves)
def test_only_the_rows_that_count_are_seen(
    dim: int, window: int | None, maker: KvMaker, dtype: Any, steps: list[Move]
) -> None:
    follow(dim, window, maker, dtype, CAPACITY, steps)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_contexts_too(dim: int, dtype: Any) -> None:
    steps = [(512, 512, 0)] * 5 + [(1, 1, 0), (8, 3, 0), (16, 16, 1500), (8, 8, 0), (512, 512, 0)]
    steps += [(4, 4, 3), (512, 512, 0), (8, 5, 2000), (1, 1, 0), (8, 8, 9999), (70, 70, 0)]
    follow(dim, None, PlainRows, dtype, 3000, steps)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("window", [None, 40])
def test_what_was_no_number_is_forgotten_at_the_start(dim: int, window: int | None) -> None:
    cache = SlicedCache([Layer(window, head_dim=dim)], CAPACITY, dtype=torch.bfloat16, device=CPU)
    context = SlicedContext(
        ContextShape((window,), HEADS, KV_HEADS, dim, block=8, capacity=CAPACITY),
        dtype=torch.bfloat16,
        device=CPU,
    )
    for value in (float("nan"), 1.0):
        rows = torch.full((1, KV_HEADS, 9, dim), value, dtype=torch.bfloat16)
        count = 9 if value != 1.0 else 2
        cache.crop(0)
        cache.begin(count)
        keys, values = cache.update(rows[:, :, :count], rows[:, :, :count], 0)
        cache.advance(count)
        context.crop(0)
        context.begin(count)
        seen = context.peek(0, *(rows[0, :, :count].transpose(0, 1),) * 2)
    for tensor in (keys, values, *seen):
        assert bool(tensor.isfinite().all())


def follow(
    dim: int, window: int | None, maker: KvMaker, dtype: Any, capacity: int, steps: list[Move]
) -> None:
    """Do the moves and hold every forward's attention against the formula."""
    cache = SlicedCache(
        [Layer(window, head_dim=dim)] * 2, capacity, dtype=dtype, device=CPU, rows=maker
    )
    step = column_step(dtype, CPU)
    draws = torch.Generator().manual_seed(1)
    held = torch.zeros(2, KV_HEADS, 0, dim, dtype=dtype)
    for rows, keep, back in steps:
        if held.shape[2] + rows > capacity:
            continue
        fresh = torch.randn(2, KV_HEADS, rows, dim, generator=draws).to(dtype)
        query = torch.randn(1, HEADS, rows, dim, generator=draws).to(dtype)
        cache.begin(rows)
        mask = cache.mask(window, GROUPS)
        whole = torch.cat((held, fresh), dim=2)
        for layer in range(2):
            keys, values = cache.update(fresh[:1], fresh[1:], layer)
            columns = values.shape[2] if values.dim() == 4 else values.shape[2] * values.shape[4]
            assert columns == cache.columns(window)
            assert columns % step == 0 or whole.shape[2] > 0.8 * capacity or window
            out = folded_attention(query, keys, values, mask, 0.3)
            assert bool(out.isfinite().all())
            near = 0.05 if dtype == torch.bfloat16 or maker is Int8Rows else 1e-5
            torch.testing.assert_close(
                out.float(), expected(query, whole, window), atol=near, rtol=near
            )
        keep = min(keep, rows)
        cache.advance(keep)
        length = cache.crop(max(0, held.shape[2] + keep - back))
        held = whole[:, :, :length]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_sees_the_context_and_itself(
    dim: int, window: int | None, causal: bool, dtype: Any
) -> None:
    shape = ContextShape((window,), HEADS, KV_HEADS, dim, block=8, capacity=CAPACITY)
    context = SlicedContext(shape, dtype=dtype, device=CPU)
    draws = torch.Generator().manual_seed(2)
    held = torch.zeros(2, KV_HEADS, 0, dim, dtype=dtype)
    for rows, length in ((30, 30), (5, 35), (70, 105), (3, 90), (8, 98)):
        context.crop(length - rows)
        held = held[:, :, : length - rows]
        fresh = torch.randn(2, KV_HEADS, rows, dim, generator=draws).to(dtype)
        context.begin(rows)
        context.write(*fresh.permute(0, 2, 1, 3)[:, :, None])
        context.advance(rows)
        held = torch.cat((held, fresh), dim=2)
        block = torch.randn(2, 8, KV_HEADS, dim, generator=draws).to(dtype)
        query = torch.randn(1, HEADS, 8, dim, generator=draws).to(dtype)
        context.begin(8)
        mask = context.mask(window, causal=causal)
        keys, values = context.peek(0, *block)
        out = folded_attention(query, keys, values, mask, 0.3)
        whole = torch.cat((held, block.permute(0, 2, 1, 3)), dim=2)
        if causal:
            truth = expected(query, whole, window)
        else:  # a row sees the whole block, and the context as far as its window goes
            truth = torch.cat(
                [by_row(query[:, :, row : row + 1], whole, 7 - row, window) for row in range(8)],
                dim=1,
            )
        near = 0.05 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.float(), truth, atol=near, rtol=near)


def by_row(query: Any, rows: Any, behind: int, window: int | None) -> Any:
    """Attention of one block row that has ``behind`` rows behind it."""
    first = 0 if window is None else max(0, rows.shape[2] - behind - window)
    return expected(query, rows[:, :, first:], None)
