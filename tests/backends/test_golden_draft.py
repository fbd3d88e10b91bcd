"""The draft against vectors of the published reference: four variants, three calls each."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_local.draft_config import parse_draft_config
from tests.support.kits import DATA, Kit

FOLDER = DATA / "dflash_tiny"
VARIANTS = {
    "full": "config.json",
    "swa_default_causal": "config_swa_default_causal.json",
    "swa_bidirectional": "config_swa_bidirectional.json",
    "yarn": "config_yarn.json",
}


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_calls_with_a_growing_context(kit: Kit, variant: str) -> None:
    config = parse_draft_config(json.loads((FOLDER / VARIANTS[variant]).read_text()))
    inputs = load_file(FOLDER / "inputs.safetensors")
    outputs = load_file(FOLDER / "outputs.safetensors")
    draft = kit.draft(
        config,
        load_file(FOLDER / "model.safetensors"),
        inputs["target_embed"],
        inputs["target_lm_head"],
    )
    for call in (1, 2, 3):
        draft.append(inputs[f"ctx_call{call}"][0])
        block = [int(i) for i in inputs[f"block_call{call}"][0]]
        name = f"{variant}.call{call}"
        close(draft.hidden(block), outputs[f"{name}.hidden"][0])
        logits = draft.logits(block[0], 3)
        close(logits, outputs[f"{name}.logits"][0])
        assert logits.argmax(-1).tolist() == outputs[f"{name}.argmax"][0].tolist()
        if variant == "full":
            for layer in (0, 1):
                close(draft.keys(layer), outputs[f"{name}.cache_k.{layer}"][0])
                close(draft.values(layer), outputs[f"{name}.cache_v.{layer}"][0])
