"""Processing of logits and rejection sampling against vectors of the published reference."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dflash_local.sampling import SamplingParams
from tests.support.kits import DATA
from tests.support.sampling_kits import DraftedArrays, SamplingKit, sampling_kits

VECTORS: dict[str, Any] = json.loads((DATA / "rejection.json").read_text())
every_kit = pytest.mark.parametrize("kit", sampling_kits(), ids=lambda kit: kit.name)


@every_kit
@pytest.mark.parametrize("index", range(len(VECTORS["sampling_probs"])))
def test_probabilities(kit: SamplingKit, index: int) -> None:
    case = VECTORS["sampling_probs"][index]
    sampling = SamplingParams(
        temperature=case["temperature"], top_p=case["top_p"], top_k=case["top_k"]
    )
    found = kit.distribution(np.array(case["logits"], np.float32), sampling)
    np.testing.assert_allclose(found, case["probs"], atol=1e-5)


@every_kit
@pytest.mark.parametrize("index", range(len(VECTORS["rejection"])))
def test_acceptance_and_residual(kit: SamplingKit, index: int) -> None:
    case = VECTORS["rejection"][index]
    q = np.array(case["draft_probs"], np.float32)
    candidates = case.get("draft_candidate_ids") or np.broadcast_to(np.arange(q.shape[1]), q.shape)
    drafted = DraftedArrays(np.array(case["draft_tokens"]), q, np.array(candidates))
    accepted, weights = kit.settle(
        np.array(case["target_probs"], np.float32), drafted, np.array(case["uniforms"], np.float32)
    )
    assert int(accepted) == case["accepted"]
    np.testing.assert_allclose(weights / weights.sum(), case["next_token_distribution"], atol=1e-5)


@every_kit
@pytest.mark.parametrize("spread", [0.1, 4.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_over_a_large_vocabulary(kit: SamplingKit, spread: float, top_p: float) -> None:
    """Flat and peaked rows, so that few ids and nearly all of them are kept."""
    logits = np.random.default_rng(0).normal(0.0, spread, (3, 5000)).astype(np.float32)
    found = kit.distribution(logits, SamplingParams(temperature=1.0, top_p=top_p))
    for row, kept in zip(logits.astype(np.float64), found, strict=True):
        probs = np.exp(row) / np.exp(row).sum()
        order = np.argsort(-probs)
        inside = probs[order].cumsum() - probs[order] < top_p
        assert abs(int((kept > 0).sum()) - int(inside.sum())) <= 2  # fp32 sums at the edge
        expected = np.zeros(5000)
        expected[order[inside]] = probs[order[inside]] / probs[order[inside]].sum()
        np.testing.assert_allclose(kept, expected, atol=2e-4)
