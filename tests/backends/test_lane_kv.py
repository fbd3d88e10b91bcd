"""K/V in lanes and the attention that is compiled over them: rows come back as they were written,
and what comes out is the formula, for every number of rows, heads, columns and threads, on wide
registers and, in fp32, on those of a CPU without AVX512."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dflash_local import free_memory  # noqa: E402
from dflash_local.backends import (  # noqa: E402
    torch_lane_attention,
    torch_lane_rows,
    torch_machine_code,
)
from dflash_local.backends.torch_attention import (  # noqa: E402
    additive_mask,
    folded_attention,
    spelled_attention,
)
from dflash_local.backends.torch_cache import SlicedCache  # noqa: E402
from dflash_local.backends.torch_kv_rows import PlainRows  # noqa: E402
from dflash_local.backends.torch_lane_attention import STEP, prepare  # noqa: E402
from dflash_local.backends.torch_lane_rows import LaneRows, fits  # noqa: E402
from dflash_local.backends.torch_machine_code import Lanes, lanes_of  # noqa: E402

CPU, HALF, SINGLE = torch.device("cpu"), torch.bfloat16, torch.float32
KINDS = {"bf16": HALF, "fp32": SINGLE, "fp32, narrow": SINGLE}
NEAR = {HALF: 8e-3, SINGLE: 8e-5}
"""bf16 has eight bits: the weights lose a part in 512, and so does what comes out. In fp32 a score
of tens has so many digits behind the point."""


@pytest.fixture(params=KINDS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kind of numbers, held as this CPU holds them, or a narrower one."""
    kind = KINDS[request.param]
    if lanes_of(kind) is None:
        pytest.skip("this CPU has no such lanes, or LLVM is not here")
    if "narrow" in request.param:
        for module in (torch_lane_attention, torch_lane_rows):
            monkeypatch.setattr(module, "lanes_of", lambda dtype: Lanes(8, 1, 16))
    return kind


@pytest.fixture
def one_thread_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def buffers(heads: int, rows: int, dim: int, dtype: Any) -> LaneRows:
    return LaneRows((1, heads, rows, dim), dtype, CPU, cleared=True)


def formula(query: Any, keys: Any, values: Any, visible: Any, scale: float) -> Any:
    """Softmax attention in fp64, ``[1, rows, heads, dim]``."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = query.double() @ keys.mT * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ values).transpose(1, 2)


def near(out: Any, truth: Any, dtype: Any) -> None:
    torch.testing.assert_close(out.double(), truth, atol=NEAR[dtype], rtol=NEAR[dtype])


same_fixtures = [HealthCheck.function_scoped_fixture]  # nothing in them changes from case to case
places = st.tuples(st.integers(0, 100), st.integers(1, 60))


@settings(max_examples=40, deadline=None, suppress_health_check=same_fixtures)
@given(
    dim=st.sampled_from([16, 48, 64]),
    acts=st.lists(
        st.tuples(st.sampled_from(["write", "hold", "move", "arrange"]), places), max_size=12
    ),
)
def test_rows_are_those_of_a_plain_buffer(
    dtype: Any, dim: int, acts: list[tuple[str, Any]]
) -> None:
    size = (1, 2, 160, dim)
    both = (buffers(*size[1:], dtype), PlainRows(size, dtype, CPU, cleared=True))
    draws = torch.Generator().manual_seed(5)
    for act, (start, count) in acts:
        place = slice(start, start + count)
        fresh = torch.randn(2, 1, count, 2, dim, generator=draws).to(dtype).transpose(2, 3)
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
        whole = slice(0, size[2])
        for ours, plain in zip(both[0].taken(whole), both[1].taken(whole), strict=True):
            assert torch.equal(ours, plain)


@settings(max_examples=80, deadline=None, suppress_health_check=same_fixtures)
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
    dtype: Any,
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
        return torch.randn(*shape, generator=draws).to(dtype)

    columns, heads = steps * STEP, kv_heads * groups
    # As a forward has them: heads side by side in a row, and taken out of a wider product.
    query = (numbers(1, rows, heads + 3, dim)[:, :, :heads] * spread).transpose(1, 2)
    keys, values = numbers(1, kv_heads, columns, dim), numbers(1, kv_heads, columns, dim)
    own = buffers(kv_heads, columns + STEP, dim, dtype)
    own.write(slice(0, columns), keys, values)
    visible = torch.rand(rows, columns, generator=draws) < 0.5
    visible[:, seed % columns] = True
    if not masked:
        visible = torch.ones_like(visible)
    mask = additive_mask(visible, groups, dtype) if masked else None
    out = folded_attention(query, *own.read(slice(0, columns)), mask, dim**-0.5)
    assert out.shape == (1, rows, heads, dim)
    near(out, formula(query, keys, values, visible, dim**-0.5), dtype)


@pytest.mark.parametrize("size", [1e-30, 100.0, 1e18])
def test_scores_of_any_size_stay_numbers(dtype: Any, size: float) -> None:
    own = buffers(1, STEP, 16, dtype)
    draws = torch.Generator().manual_seed(9)
    keys, values = torch.randn(2, 1, 1, STEP, 16, generator=draws).to(dtype)
    keys = (keys.float() * size).to(dtype)
    own.write(slice(0, STEP), keys, values)
    query = torch.randn(1, 2, 3, 16, generator=draws).to(dtype)
    out = folded_attention(query, *own.read(slice(0, STEP)), None, 0.25)
    truth = formula(query, keys, values, torch.ones(3, STEP, dtype=torch.bool), 0.25)
    if size == 100.0:  # scores of hundreds keep so much less behind the point
        torch.testing.assert_close(out.double(), truth, atol=1e-2, rtol=1e-2)
    else:
        near(out, truth, dtype)


def test_a_row_is_the_same_among_others(dtype: Any) -> None:
    draws = torch.Generator().manual_seed(10)
    own = buffers(2, 192, 64, dtype)
    own.write(slice(0, 192), *torch.randn(2, 1, 2, 192, 64, generator=draws).to(dtype))
    query = torch.randn(1, 6, 20, 64, generator=draws).to(dtype)
    read = own.read(slice(0, 192))
    whole = folded_attention(query, *read, None, 0.125)
    for rows in (slice(0, 1), slice(3, 5), slice(5, 20)):
        alone = folded_attention(query[:, :, rows], *read, None, 0.125)
        assert torch.equal(alone, whole[:, rows])


@pytest.mark.usefixtures("one_thread_after")
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_threads_share_the_work_and_change_nothing(dtype: Any, rows: int) -> None:
    draws = torch.Generator().manual_seed(6)
    own = buffers(3, 128, 64, dtype)
    own.write(slice(0, 128), *torch.randn(2, 1, 3, 128, 64, generator=draws).to(dtype))
    query = torch.randn(1, 9, rows, 64, generator=draws).to(dtype)
    outs = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        outs.append(folded_attention(query, *own.read(slice(0, 128)), None, 0.125))
    assert all(torch.equal(outs[0], out) for out in outs[1:])


LIMITS = [{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true"}, {"OMP_MAX_ACTIVE_LEVELS": "0"}]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: next(iter(limit)))
@pytest.mark.parametrize("asked", ["torch.set_num_threads", "use_threads"])
def test_a_team_may_be_smaller_than_asked_for(limit: dict[str, str], asked: str) -> None:
    """The system's limits are read once, so in a process of its own. Our code holds by itself,
    torch's where ``use_threads`` has asked."""
    if lanes_of(SINGLE) is None:
        pytest.skip("this CPU has no such lanes, or LLVM is not here")
    source = f"""
import torch
from dflash_local.backends.torch_attention import folded_attention
from dflash_local.backends.torch_lane_rows import LaneRows
from dflash_local.backends.torch_machine_code import use_threads

rows = LaneRows((1, 4, 64, 16), torch.float32, torch.device("cpu"), cleared=True)
rows.write(slice(0, 64), *torch.randn(2, 1, 4, 64, 16))
query, read, outs = torch.randn(1, 8, 30, 16), rows.read(slice(0, 64)), []
states, weight = torch.randn(8, 512), torch.randn(1024, 512)
for threads in (1, 2):
    {asked}(threads)
    outs.append((folded_attention(query, *read, None, 0.25), states @ weight.T))
assert torch.equal(outs[0][0], outs[1][0])
if "{asked}" == "use_threads":
    torch.testing.assert_close(outs[0][1], outs[1][1])
"""
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **limit})
    assert done.returncode == 0, done.stderr


def test_what_does_not_fit_is_refused(dtype: Any) -> None:
    """Nothing behind the call would notice."""
    own = buffers(2, STEP, 32, dtype)
    keys, values = torch.zeros(2, 1, 2, 8, 32, dtype=dtype)
    own.write(slice(0, 8), keys, values)
    for place, k, v in (
        (slice(0, 9), keys, values),
        (slice(60, 68), keys, values),
        (slice(0, 8), keys.expand(1, 2, 8, 32).repeat(1, 2, 1, 1), values),
        (slice(0, 8), keys[..., :16], values),
        (slice(0, 8), keys, torch.cat((values, values), dim=-1)),
    ):
        with pytest.raises(ValueError, match="lies"):
            own.write(place, k, v)
    with pytest.raises(TypeError):
        own.write(slice(0, 8), keys.double(), values)
    with pytest.raises(ValueError, match="in steps of"):
        own.read(slice(0, 8))
    read = own.read(slice(0, STEP))
    query = torch.zeros(1, 4, 3, 32, dtype=dtype)
    for wrong in (torch.zeros(2, STEP, dtype=dtype), torch.zeros(3, STEP + 1, dtype=dtype)):
        with pytest.raises(ValueError, match="mask"):
            folded_attention(query, *read, wrong, 1.0)
    with pytest.raises(ValueError, match="attention of"):
        folded_attention(query[:, :3], *read, None, 1.0)
    with pytest.raises(TypeError):
        folded_attention(query.double(), *read, None, 1.0)


def test_what_is_no_number_stays_none_and_what_is_masked_weighs_nothing(dtype: Any) -> None:
    draws = torch.Generator().manual_seed(11)
    keys, values = torch.randn(2, 1, 2, STEP, 32, generator=draws).to(dtype)
    query = torch.randn(1, 4, 3, 32, generator=draws).to(dtype)
    mask = torch.zeros(3, STEP, dtype=dtype)
    mask[:, 40:] = float("-inf")

    def out(query: Any, keys: Any, values: Any) -> Any:
        own = buffers(2, STEP, 32, dtype)
        own.write(slice(0, STEP), keys, values)
        return folded_attention(query, *own.read(slice(0, STEP)), mask, 0.2)

    truth = out(query, keys, values)
    huge = values.clone()
    huge[:, :, 40:] = torch.finfo(dtype).max
    assert torch.equal(out(query, keys, huge), truth)
    for value in (float("nan"), float("inf")):
        bad = query.clone()
        bad[:, 1, 2] = value
        wrong = out(bad, keys, values)
        assert bool(wrong[:, 2, 1].isnan().all())
        assert torch.equal(wrong[:, :2], truth[:, :2])
        bad = keys.clone()
        bad[:, 0, 7] = value
        assert not bool(out(query, bad, values)[:, :, :2].isfinite().any())


@pytest.mark.parametrize("broken", ["import", "version", "result"])
def test_an_llvm_that_does_not_work_is_not_used(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lanes_of(SINGLE) is None:
        pytest.skip("this CPU has no such lanes, or LLVM is not here")
    if broken == "import":
        monkeypatch.setitem(sys.modules, "llvmlite", None)
    elif broken == "version":
        monkeypatch.setattr(free_memory, "version", lambda name: "0.45.0")
    else:
        monkeypatch.setattr(torch_machine_code.Entry, "__call__", lambda self, *given: None)
    for found in (lanes_of, torch_machine_code._runs):
        monkeypatch.setattr(torch_machine_code, found.__name__, cache(found.__wrapped__))
    assert torch_machine_code.lanes_of(SINGLE) is None


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_is_spelled_step_by_step_reads_lanes_too(dtype: Any, softcap: float | None) -> None:
    draws = torch.Generator().manual_seed(7)
    keys, values = torch.randn(2, 1, 2, STEP, 32, generator=draws).to(dtype)
    own = buffers(2, STEP, 32, dtype)
    own.write(slice(0, STEP), keys, values)
    query = torch.randn(1, 4, 3, 32, generator=draws).to(dtype)
    rest = (None, 0.2, torch.linspace(-1, 1, 4), softcap)
    ours = spelled_attention(query, *own.read(slice(0, STEP)), *rest)
    assert torch.equal(ours, spelled_attention(query, keys, values, *rest))


def test_lanes_lie_only_where_they_can(dtype: Any) -> None:
    assert fits(64, dtype, CPU)
    assert not fits(36, dtype, CPU)
    assert not fits(64, dtype, torch.device("cuda"))
    assert lanes_of(torch.float16) is None


def test_a_second_call_compiles_nothing(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = torch_lane_rows.lanes_of(dtype)
    assert lanes is not None
    prepare(lanes, 3, 32, 8)
    monkeypatch.setattr(torch_lane_attention, "Entry", lambda code: pytest.fail("compiled"))
    own = buffers(2, STEP, 32, dtype)
    for rows in range(1, 9):
        query = torch.randn(1, 6, rows, 32).to(dtype)
        folded_attention(query, *own.read(slice(0, STEP)), None, 32**-0.5)


@pytest.mark.parametrize("rows", [1, 6])
def test_without_llvm_the_same_comes_out(
    dtype: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layer:
        window, kv_heads, head_dim, stored = None, 2, 32, True

    draws = torch.Generator().manual_seed(8)
    past, new = (torch.randn(2, 1, 2, n, 32, generator=draws).to(dtype) for n in (130, rows))
    query = torch.randn(1, 6, rows, 32, generator=draws).to(dtype)
    outs = []
    for there in (True, False):
        monkeypatch.setattr(torch_lane_rows, "fits", lambda *asked, there=there: there)
        cache = SlicedCache([Layer()], 400, dtype=dtype, device=CPU)
        for fresh in (past, new):
            cache.begin(fresh.shape[3])
            keys, values = cache.update(*fresh, 0)
            mask = cache.mask(None, 3)
            cache.advance(fresh.shape[3])
        assert (keys.dim() == 4) is not there
        outs.append(folded_attention(query, keys, values, mask, 0.2).double())
    near(outs[0], outs[1], dtype)
