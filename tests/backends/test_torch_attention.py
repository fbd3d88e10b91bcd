"""Attention over folded groups against the plain formula, in both layouts of K."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends.torch_attention import (  # noqa: E402
    additive_mask,
    empty_keys,
    folded_attention,
    spelled_attention,
)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_every_layout_gives_the_formula(turned: bool, masked: bool, rows: int) -> None:
    heads, kv_heads, length, dim = 6, 2, 11, 8
    torch.manual_seed(3)
    query = torch.randn(1, heads, rows, dim)
    key, value = torch.randn(2, 1, kv_heads, length, dim)
    visible = torch.arange(length) <= torch.arange(length - rows, length)[:, None]
    if not masked:
        visible = torch.ones_like(visible)
    repeated = [x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value)]
    scores = query @ repeated[0].transpose(-1, -2) * 0.3
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    expected = (weights @ repeated[1]).transpose(1, 2)

    laid_out = key.transpose(-1, -2).contiguous().transpose(-1, -2) if turned else key
    mask = additive_mask(visible, heads // kv_heads, torch.float32) if masked else None
    out = folded_attention(query, laid_out, value, mask, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_scores_in_parts_are_the_scores_of_all(
    sinks: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, rows, length, dim = 6, 2, 7, 30, 8
    torch.manual_seed(4)
    query = torch.randn(1, heads, rows, dim)
    key, value = torch.randn(2, 1, kv_heads, length, dim)
    turned = key.mT.contiguous().mT
    visible = torch.rand(rows, length) < 0.8
    mask = additive_mask(visible, heads // kv_heads, torch.float32) if masked else None

    def attended() -> Any:
        if sinks:
            column = torch.linspace(-1, 1, heads)
            return spelled_attention(query, key, value, mask, 0.3, column, 5.0)
        return folded_attention(query, turned, value, mask, 0.3)

    whole = attended()
    for most in (1, length, 4 * length, 100 * length):
        monkeypatch.setattr("dflash_local.backends.torch_attention.SCORES_AT_ONCE", most)
        torch.testing.assert_close(attended(), whole)


def test_keys_lie_turned_only_where_that_is_faster() -> None:
    cpu = torch.device("cpu")
    assert empty_keys((2, 8, 4), torch.bfloat16, cpu).stride(-1) != 1
    assert empty_keys((2, 8, 4), torch.float32, cpu).stride(-1) == 1
    assert empty_keys((2, 8, 4), torch.bfloat16, cpu).shape == (2, 8, 4)
