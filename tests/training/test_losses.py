"""What is computed a slice at a time, or product by product, against the plain formulas."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.training.losses import _ROWS_AT_ONCE, _Nearness  # noqa: E402
from dflash_local.training.network import _attend, _visible  # noqa: E402


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("rows", [0, 1, _ROWS_AT_ONCE, 2 * _ROWS_AT_ONCE + 3])
def test_slices_give_the_cross_entropy_and_its_gradient(rows: int, width: int) -> None:
    torch.manual_seed(0)
    states = torch.randn(rows, 32, requires_grad=True)
    head, correction = torch.randn(100, 32), torch.randn(100)
    best = torch.rand(rows, 100).topk(8).indices
    shares, weights = torch.rand(rows, 8).softmax(-1), torch.rand(rows)

    def losses(scores: Any) -> Any:
        return -(shares * scores.log_softmax(-1).gather(-1, best)).sum(-1)

    scores = states @ head.T + correction
    (weights * losses(scores)).sum().backward()
    expected, states.grad = states.grad, None
    each, values, places = _Nearness.apply(states, head, correction, best, shares, width)
    (weights * each).sum().backward()
    torch.testing.assert_close(each, losses(scores))
    torch.testing.assert_close(states.grad, expected, atol=1e-5, rtol=1e-4)
    highest = scores.detach().topk(width, dim=-1)
    torch.testing.assert_close(values, highest.values)
    assert places.equal(highest.indices)


def test_both_ways_of_attention_are_the_same() -> None:
    torch.manual_seed(0)
    anchors = torch.tensor([[2, 7], [5, 1]])
    query = torch.randn(2, 2, 12, 16)
    keys, values = torch.randn(2, 2, 2, 15, 16)
    fused = _attend(query, keys, values, _visible(anchors, 9, 3, 2))
    with torch.autocast("cpu", torch.bfloat16):
        mask = _visible(anchors, 9, 3, 2)
        assert mask.dtype == torch.bfloat16
        spelled = _attend(query, keys, values, mask)
    assert (spelled.float() - fused).norm() < 0.02 * fused.norm()
