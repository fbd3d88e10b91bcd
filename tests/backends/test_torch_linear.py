"""Products with packed weights are the stock ones, at every number of rows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends.torch_linear import (  # noqa: E402
    DenseLinear,
    PackedLinear,
    can_pack,
    dense,
)

TYPES = [torch.bfloat16, torch.float32]


def _packable(dtype: Any) -> None:
    if not can_pack(torch.zeros(8, 16, dtype=dtype)):
        pytest.skip(f"this build has no packed products in {dtype}")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_products_are_the_stock_ones(rows: int, biased: bool, dtype: Any) -> None:
    _packable(dtype)
    torch.manual_seed(1)
    weight = torch.randn(96, 80).to(dtype)
    bias = torch.randn(96).to(dtype) if biased else None
    states = torch.randn(rows, 80).to(dtype)
    with torch.inference_mode():
        ours = PackedLinear(weight, bias)(states)
        exact = states.double() @ weight.double().T + (0 if bias is None else bias.double())
    close = (
        {"atol": 0.06, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 1e-5}
    )
    torch.testing.assert_close(ours.double(), exact, **close)
    assert ours.dtype == dtype


@pytest.mark.parametrize("dtype", TYPES)
def test_a_packed_weight_tells_its_size(dtype: Any) -> None:
    _packable(dtype)
    packed = dense("x", torch.zeros(8, 16, dtype=dtype), torch.zeros(8, dtype=dtype))
    assert isinstance(packed, PackedLinear)
    assert packed.bytes == dtype.itemsize * (8 * 16 + 8)


def test_other_types_and_devices_are_kept_as_they_are() -> None:
    assert isinstance(dense("x", torch.zeros(8, 8, dtype=torch.float16)), DenseLinear)
    assert not can_pack(torch.zeros(8, 8, device="meta"))
