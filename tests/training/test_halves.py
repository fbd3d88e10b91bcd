"""Products with fp16 weights say what fp32 says."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from dflash_local.training.halves import has_half_products, quicken

pytestmark = pytest.mark.skipif(not has_half_products(), reason="no fp16 products here")


@pytest.mark.parametrize("bias", [False, True])
def test_products_keep_bf16_weights(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 56, bias=bias), nn.SiLU(), nn.Linear(56, 40, bias=bias))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    states = torch.randn(3, 7, 96)
    with torch.inference_mode():
        expected = model(states)
        kept = [parameter.clone() for parameter in model.parameters()]
        quicken(model)
        assert isinstance(model[0].forward, partial), "nothing was quickened"
        torch.testing.assert_close(model(states), expected, atol=1e-6, rtol=1e-5)
    for before, parameter in zip(kept, model.parameters(), strict=True):
        assert torch.equal(before, parameter), "who asks for the weights gets them as they were"


def test_what_fp16_cannot_hold_stays() -> None:
    large, half = nn.Linear(64, 64), nn.Linear(64, 64).bfloat16()
    with torch.no_grad():
        large.weight[3, 5] = 70_000.0
    states = torch.randn(2, 64)
    expected = large(states)
    quicken(nn.ModuleList([large, half]))
    assert torch.equal(large(states), expected)
    assert half(states.bfloat16()).dtype == torch.bfloat16


def test_a_module_that_does_more_than_multiply_stays() -> None:
    class Router(nn.Linear):
        def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            best = super().forward(states).topk(2, dim=-1)
            return best.values, best.indices

    router, states = Router(64, 16), torch.randn(3, 64)
    values, places = router(states)
    quicken(router)
    after = router(states)
    assert torch.equal(after[0], values)
    assert torch.equal(after[1], places)
