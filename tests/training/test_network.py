"""The network that is trained computes what the published reference does."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_local.draft_config import parse_draft_config
from dflash_local.training.network import DraftNetwork
from tests.support.kits import DATA


@pytest.mark.parametrize(
    ("folder", "variant", "config"),
    [
        ("dflash_tiny", "full", "config.json"),
        ("dflash_tiny", "yarn", "config_yarn.json"),
        ("dflash2_tiny", "full", "config.json"),
    ],
)
def test_three_blocks_of_one_sequence_at_once(folder: str, variant: str, config: str) -> None:
    """The reference's three calls, whose context grows, are three blocks of one forward."""
    home = DATA / folder
    numbers = parse_draft_config(json.loads((home / config).read_text()))
    inputs, outputs = (
        load_file(home / "inputs.safetensors"),
        load_file(home / "outputs.safetensors"),
    )
    network = DraftNetwork(numbers, 64)
    network.load_state_dict(load_file(home / "model.safetensors"))
    calls = (1, 2, 3)
    features = torch.cat([inputs[f"ctx_call{call}"] for call in calls], dim=1)
    lengths = [inputs[f"ctx_call{call}"].shape[1] for call in calls]
    blocks = torch.stack([inputs[f"block_call{call}"][0] for call in calls])
    embedded = inputs["target_embed"][blocks][None] * numbers.input_embedding_scale
    with torch.no_grad():
        states = network(features, torch.tensor([np.cumsum(lengths).tolist()]), embedded)[0]
    for index, call in enumerate(calls):
        expected = outputs[f"{variant}.call{call}.hidden"][0]
        np.testing.assert_allclose(states[index], expected, atol=5e-5, rtol=1e-4)
