"""Products are the stock ones, however the weight is stored and at every number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends import torch_linear  # noqa: E402
from dflash_local.backends.torch_linear import (  # noqa: E402
    ByteLinear,
    DenseLinear,
    HalfLinear,
    PackedLinear,
    TallLinear,
    can_pack,
    dense,
    half,
    has_byte_products,
    has_half_products,
    light,
)

HOW: dict[str, tuple[Any, Any]] = {
    "packed bf16": (PackedLinear, torch.bfloat16),
    "packed fp32": (PackedLinear, torch.float32),
    "tall": (TallLinear, torch.float32),
    "half under bf16": (HalfLinear, torch.bfloat16),
    "half under fp32": (HalfLinear, torch.float32),
}
needs_half = pytest.mark.skipif(not has_half_products(), reason="no fp16 products on this CPU")

CLOSE = {torch.bfloat16: {"atol": 0.06, "rtol": 0.02}, torch.float32: {"atol": 2e-5, "rtol": 1e-5}}


@pytest.fixture
def threads() -> Iterator[Any]:
    """Sets torch's threads; they are put back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_the_stock_ones(how: str, rows: int, biased: bool, threads: Any) -> None:
    threads(2)
    kind, dtype = HOW[how]
    if kind is PackedLinear and not can_pack(torch.zeros(8, 16, dtype=dtype)):
        pytest.skip(f"this build has no packed products in {dtype}")
    if kind is HalfLinear and not has_half_products():
        pytest.skip("no fp16 products on this CPU")
    torch.manual_seed(1)
    # Numbers of both types, no multiple of any kernel's blocks.
    weight = torch.randn(4100, 80).bfloat16().to(dtype)
    bias = torch.randn(4100).to(dtype) if biased else None
    states = torch.randn(rows, 80).to(dtype)
    with torch.inference_mode():
        linear = kind(weight, bias)
        ours = linear(states)
        exact = states.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(ours.double(), exact, **CLOSE[dtype])
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    held = 2 * 4112 * 512 if kind is HalfLinear else dtype.itemsize * 4100 * 80
    assert linear.bytes == held + dtype.itemsize * 4100 * biased


def test_the_way_follows_from_type_threads_and_cpu(
    threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(dtype: Any) -> type:
        return type(dense("x", torch.zeros(64, 64, dtype=dtype)))

    if can_pack(torch.zeros(8, 16, dtype=torch.bfloat16)):
        assert kind(torch.bfloat16) is PackedLinear
    monkeypatch.setattr(torch_linear, "is_x86", lambda: True)
    threads(1)
    assert kind(torch.float32) is TallLinear
    threads(2)
    if can_pack(torch.zeros(8, 16)):
        assert kind(torch.float32) is PackedLinear
    monkeypatch.setattr(torch_linear, "can_pack", lambda weight: False)
    if has_half_products():
        assert kind(torch.bfloat16) is HalfLinear
    monkeypatch.setattr(torch_linear, "has_half_products", lambda: False)
    assert kind(torch.bfloat16) is DenseLinear
    assert kind(torch.float16) is DenseLinear
    monkeypatch.setattr(torch_linear, "is_x86", lambda: False)
    assert kind(torch.float32) is DenseLinear
    assert not can_pack(torch.zeros(8, 8, device="meta"))


@needs_half
def test_fp16_keeps_what_bf16_holds() -> None:
    """Every number of bf16 that fp16 can hold, down to where the steps of fp16 begin to show."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    held = numbers[numbers.abs().float() <= torch.finfo(torch.float16).max]
    kept = HalfLinear(held[:, None])(torch.ones(1, 1)).flatten()
    moved = (kept - held.float()).abs()
    assert moved[held.abs().float() >= 2.0**-17].max() == 0.0
    assert 0.0 < moved.max() <= 2.0**-25


@needs_half
@pytest.mark.parametrize("odd", [1e5, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_fp16_cannot_hold_stays(odd: float, dtype: Any) -> None:
    weight = torch.randn(8, 16).to(dtype)
    assert type(half("x", weight)) is HalfLinear
    weight[3, 5] = odd
    ours = half("x", weight)(torch.ones(1, 16, dtype=dtype))
    assert not isinstance(half("x", weight), HalfLinear)
    assert torch.equal(ours.isfinite(), (torch.ones(1, 16) @ weight.float().t()).isfinite())


@needs_half
def test_odd_states_are_multiplied_as_well() -> None:
    torch.manual_seed(3)
    weight = torch.randn(48, 32).half().float()
    linear = half("x", weight)
    for states in (torch.randn(32, 5).t(), torch.randn(5, 64)[:, ::2], torch.randn(0, 32)):
        torch.testing.assert_close(linear(states), states @ weight.t(), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not has_byte_products(), reason="this CPU has no such products")
@pytest.mark.parametrize("rows", [1, 4, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_eight_bits_are_about_right(rows: int, dtype: Any, biased: bool) -> None:
    torch.manual_seed(1)
    weight, states = torch.randn(100, 64), torch.randn(rows, 64).to(dtype)
    weight[3] = 0.0
    bias = torch.randn(100) if biased else None
    made = ByteLinear(weight, bias)
    exact = torch.nn.functional.linear(states.float(), weight, bias)
    assert made(states).dtype == dtype
    assert (made(states).float() - exact).norm() < 0.03 * exact.norm()
    assert made.bytes == 100 * (512 + 8) + (400 if biased else 0)


@pytest.mark.skipif(not has_byte_products(), reason="this CPU has no such products")
@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_what_eight_bits_cannot_hold(odd: float) -> None:
    """A damaged draft only drafts badly; that it breaks an answer off would be worse."""
    torch.manual_seed(5)
    weight, states = torch.randn(8, 16), torch.randn(3, 16)
    made = ByteLinear(weight)
    states[1, 2] = odd
    for some in (states, torch.full((3, 16), odd)):
        once = made(some)
        assert made(once.repeat(1, 2)).shape == once.shape == (3, 8)
    weight[3, 5] = odd
    assert not isinstance(light(dense)("draft.0.qkv", weight), ByteLinear)


@pytest.mark.skipif(not has_byte_products(), reason="this CPU has no such products")
def test_raw_states_are_not_rounded_to_eight_bits() -> None:
    """A target's states have a few huge numbers, beside which the others would be nothing."""
    weight = torch.randn(32, 64)
    make = light(half)
    assert isinstance(make("draft.0.qkv", weight), ByteLinear)
    assert isinstance(make("draft.head", weight), ByteLinear)
    assert isinstance(make("draft.fc", weight), HalfLinear)
