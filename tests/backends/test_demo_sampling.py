"""Sampled decoding on the real demo pair."""

from __future__ import annotations

import pytest

from dflash_local import Engine, SamplingParams
from dflash_local.bench_prompts import chosen
from dflash_local.bench_sampling import run_sampled

pytestmark = pytest.mark.slow
pytest.importorskip("torch")


def test_both_ways_of_accepting_draft_and_a_seed_repeats(demo_engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.0, seed=0, max_tokens=24)
    report = run_sampled(demo_engine, chosen(2), sampling, block=4)
    warm = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=16)
    texts = [demo_engine.complete("Tell a joke.", warm).text for _ in range(2)]
    tau = {way.name: way.tau for way in report.ways}
    assert tau["plain"] == 0
    assert min(tau["rejection"], tau["compare"]) > 1
    assert texts[0] == texts[1]
