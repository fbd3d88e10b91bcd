"""Products with packed weights are the stock ones, at every number of rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends.torch_linear import (  # noqa: E402
    DenseLinear,
    PackedLinear,
    can_pack,
    dense,
)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_products_are_the_stock_ones(rows: int, biased: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(96, 80).bfloat16()
    if not can_pack(weight):
        pytest.skip("this build has no packed bf16 products")
    bias = torch.randn(96).bfloat16() if biased else None
    states = torch.randn(rows, 80).bfloat16()
    with torch.inference_mode():
        ours = PackedLinear(weight, bias)(states)
        exact = states.float() @ weight.float().T + (0 if bias is None else bias.float())
    torch.testing.assert_close(ours.float(), exact, atol=0.06, rtol=0.02)
    assert ours.dtype == torch.bfloat16


def test_only_bf16_on_the_cpu_is_packed() -> None:
    assert isinstance(dense("x", torch.zeros(8, 8)), DenseLinear)
    if not can_pack(torch.zeros(8, 16).bfloat16()):
        pytest.skip("this build has no packed bf16 products")
    packed = PackedLinear(torch.zeros(8, 16).bfloat16(), torch.zeros(8).bfloat16())
    assert packed.bytes == 2 * 8 * 16 + 2 * 8
