"""K/V in pairs and the attention that is compiled over them: rows come back as they were written,
and what comes out is the formula, for every number of rows, heads, columns and threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dflash_local.backends import torch_cache, torch_draft_context  # noqa: E402
from dflash_local.backends.torch_attention import (  # noqa: E402
    additive_mask,
    folded_attention,
    spelled_attention,
)
from dflash_local.backends.torch_cache import SlicedCache  # noqa: E402
from dflash_local.backends.torch_kv_rows import PlainRows  # noqa: E402
from dflash_local.backends.torch_machine_code import has_machine_code  # noqa: E402
from dflash_local.backends.torch_paired_attention import STEP, prepare  # noqa: E402
from dflash_local.backends.torch_paired_rows import PairedRows, fits  # noqa: E402

CPU, HALF = torch.device("cpu"), torch.bfloat16

pytestmark = pytest.mark.skipif(
    not has_machine_code(), reason="this CPU has no products of bf16 pairs, or LLVM is not here"
)


@pytest.fixture
def one_thread_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def buffers(heads: int, rows: int, dim: int) -> PairedRows:
    return PairedRows((1, heads, rows, dim), HALF, CPU, cleared=True)


def formula(query: Any, keys: Any, values: Any, visible: Any, scale: float) -> Any:
    """Softmax attention in fp64, ``[1, rows, heads, dim]``."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = query.double() @ keys.mT * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ values).transpose(1, 2)


places = st.tuples(st.integers(0, 100), st.integers(1, 60))


@settings(max_examples=60, deadline=None)
@given(
    dim=st.sampled_from([16, 48, 64]),
    acts=st.lists(
        st.tuples(st.sampled_from(["write", "hold", "move", "arrange"]), places), max_size=12
    ),
)
def test_rows_are_those_of_a_plain_buffer(dim: int, acts: list[tuple[str, Any]]) -> None:
    size = (1, 2, 160, dim)
    both = (buffers(*size[1:]), PlainRows(size, HALF, CPU, cleared=True))
    draws = torch.Generator().manual_seed(5)
    for act, (start, count) in acts:
        place = slice(start, start + count)
        fresh = torch.randn(2, 1, count, 2, dim, generator=draws).to(HALF).transpose(2, 3)
        order = torch.randperm(count, generator=draws)[: 1 + count // 2]
        for rows in both:
            if act == "write":
                rows.write(place, *fresh)
            elif act == "hold":
                rows.hold(start + count, start)
            elif act == "move":
                rows.move(start, start + count)
            else:
                rows.arrange(place, order)
        for ours, plain in zip(
            both[0].taken(slice(0, 160)), both[1].taken(slice(0, 160)), strict=True
        ):
            assert torch.equal(ours, plain)


@settings(max_examples=120, deadline=None)
@given(
    kv_heads=st.integers(1, 4),
    groups=st.sampled_from([1, 2, 3, 4, 5, 7, 8]),
    dim=st.sampled_from([16, 32, 48, 64, 80, 96, 128, 256]),
    rows=st.one_of(st.integers(1, 17), st.just(70)),
    steps=st.integers(1, 5),
    masked=st.booleans(),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    seed=st.integers(0, 1000),
)
def test_what_comes_out_is_the_formula(
    kv_heads: int,
    groups: int,
    dim: int,
    rows: int,
    steps: int,
    masked: bool,
    spread: float,
    seed: int,
) -> None:
    draws = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Any:
        return torch.randn(*shape, generator=draws).to(HALF)

    columns, heads = steps * STEP, kv_heads * groups
    # As a forward has them: heads side by side in a row, and taken out of a wider product.
    query = (numbers(1, rows, heads + 3, dim)[:, :, :heads] * spread).transpose(1, 2)
    keys, values = numbers(1, kv_heads, columns, dim), numbers(1, kv_heads, columns, dim)
    own = buffers(kv_heads, columns + STEP, dim)
    own.write(slice(0, columns), keys, values)
    visible = torch.rand(rows, columns, generator=draws) < 0.5
    visible[:, seed % columns] = True
    if not masked:
        visible = torch.ones_like(visible)
    mask = additive_mask(visible, groups, HALF) if masked else None
    out = folded_attention(query, *own.read(slice(0, columns)), mask, dim**-0.5)
    assert out.shape == (1, rows, heads, dim)
    truth = formula(query, keys, values, visible, dim**-0.5)
    # bf16 has eight bits: the weights lose a part in 512, and so does what comes out.
    torch.testing.assert_close(out.double(), truth, atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize("size", [1e-30, 100.0, 1e18])
def test_scores_of_any_size_stay_numbers(size: float) -> None:
    own = buffers(1, STEP, 16)
    keys, values = torch.randn(2, 1, 1, STEP, 16).to(HALF)
    keys = (keys.float() * size).to(HALF)
    own.write(slice(0, STEP), keys, values)
    query = torch.randn(1, 2, 3, 16).to(HALF)
    out = folded_attention(query, *own.read(slice(0, STEP)), None, 0.25)
    truth = formula(query, keys, values, torch.ones(3, STEP, dtype=torch.bool), 0.25)
    torch.testing.assert_close(out.double(), truth, atol=8e-3, rtol=8e-3)


@pytest.mark.usefixtures("one_thread_after")
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_threads_share_the_work_and_change_nothing(rows: int) -> None:
    draws = torch.Generator().manual_seed(6)
    own = buffers(3, 128, 64)
    own.write(slice(0, 128), *torch.randn(2, 1, 3, 128, 64, generator=draws).to(HALF))
    query = torch.randn(1, 9, rows, 64, generator=draws).to(HALF)
    outs = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        outs.append(folded_attention(query, *own.read(slice(0, 128)), None, 0.125))
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_is_spelled_step_by_step_reads_pairs_too(softcap: float | None) -> None:
    draws = torch.Generator().manual_seed(7)
    keys, values = torch.randn(2, 1, 2, STEP, 32, generator=draws).to(HALF)
    own = buffers(2, STEP, 32)
    own.write(slice(0, STEP), keys, values)
    query = torch.randn(1, 4, 3, 32, generator=draws).to(HALF)
    rest = (None, 0.2, torch.linspace(-1, 1, 4), softcap)
    ours = spelled_attention(query, *own.read(slice(0, STEP)), *rest)
    assert torch.equal(ours, spelled_attention(query, keys, values, *rest))


def test_pairs_lie_only_where_they_gain() -> None:
    assert fits(64, HALF, CPU)
    assert not fits(64, torch.float32, CPU)
    assert not fits(40, HALF, CPU)
    assert not fits(64, HALF, torch.device("cuda"))


def test_a_second_call_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(3, 32, 8)
    monkeypatch.setattr(
        "dflash_local.backends.torch_paired_attention.Entry", lambda code: pytest.fail("compiled")
    )
    own = buffers(2, STEP, 32)
    for rows in range(1, 9):
        query = torch.randn(1, 6, rows, 32).to(HALF)
        folded_attention(query, *own.read(slice(0, STEP)), None, 32**-0.5)


@pytest.mark.parametrize("rows", [1, 6])
def test_without_llvm_the_same_comes_out(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        window, kv_heads, head_dim, stored = None, 2, 32, True

    draws = torch.Generator().manual_seed(8)
    past, new = (torch.randn(2, 1, 2, n, 32, generator=draws).to(HALF) for n in (130, rows))
    query = torch.randn(1, 6, rows, 32, generator=draws).to(HALF)
    outs = []
    for there in (True, False):
        for module in (torch_cache, torch_draft_context):
            monkeypatch.setattr(module, "fits", lambda *asked, there=there: there)
        cache = SlicedCache([Layer()], 400, dtype=HALF, device=CPU)
        for fresh in (past, new):
            cache.begin(fresh.shape[3])
            keys, values = cache.update(*fresh, 0)
            mask = cache.mask(None, 3)
            cache.advance(fresh.shape[3])
        assert (keys.dim() == 4) is not there
        outs.append(folded_attention(query, keys, values, mask, 0.2).float())
    torch.testing.assert_close(*outs, atol=8e-3, rtol=8e-3)
