"""A tiny target with a chat template whose words mostly follow from the word before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.chat_pair import chat_pair

QUIET = 0.1
"""What the layers add to the embedding, against what they would: the rest is habit."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Its folder."""
    folder, _ = chat_pair(tmp_path / "pair")
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * QUIET
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file with sixty prompts of two kinds."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"text": f"Tell me about {i * i} and {i}.", "kind": "ab"[i % 2]} for i in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
