"""Products are the stock ones, however the weight is stored and at every number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends import torch_linear  # noqa: E402
from dflash_local.backends.torch_linear import (  # noqa: E402
    DenseLinear,
    PackedLinear,
    TallLinear,
    WidenedLinear,
    can_pack,
    dense,
)

HOW: dict[str, tuple[Any, Any]] = {
    "packed bf16": (PackedLinear, torch.bfloat16),
    "packed fp32": (PackedLinear, torch.float32),
    "tall": (TallLinear, torch.float32),
    "widened": (WidenedLinear, torch.bfloat16),
}
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
    torch.manual_seed(1)
    # More of the weight than is widened at a time, and not a multiple of it.
    weight = torch.randn(4100, 80).to(dtype)
    bias = torch.randn(4100).to(dtype) if biased else None
    states = torch.randn(rows, 80).to(dtype)
    with torch.inference_mode():
        linear = kind(weight, bias)
        ours = linear(states)
        exact = states.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(ours.double(), exact, **CLOSE[dtype])
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    assert linear.bytes == dtype.itemsize * (4100 * 80 + 4100 * biased)


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
    monkeypatch.setattr(torch_linear, "widens", lambda: True)
    assert kind(torch.bfloat16) is WidenedLinear
    monkeypatch.setattr(torch_linear, "widens", lambda: False)
    assert kind(torch.bfloat16) is DenseLinear
    assert kind(torch.float16) is DenseLinear
    monkeypatch.setattr(torch_linear, "is_x86", lambda: False)
    assert kind(torch.float32) is DenseLinear
    assert not can_pack(torch.zeros(8, 8, device="meta"))
