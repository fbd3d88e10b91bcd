"""The lean forward against transformers' own, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from dflash_local.backends.torch_config import target_config, target_shape  # noqa: E402
from dflash_local.backends.torch_families import FAMILIES  # noqa: E402
from dflash_local.backends.torch_lean import LeanTarget  # noqa: E402
from dflash_local.backends.torch_load import open_pair  # noqa: E402
from dflash_local.backends.torch_open_target import open_target  # noqa: E402
from dflash_local.target_shape import LEAN  # noqa: E402
from tests.support.driving import plain  # noqa: E402
from tests.support.kits import Options  # noqa: E402
from tests.support.random_target import save_target  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rotation": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "yarn rotation": ("qwen3", {"rope_parameters": YARN}),
    "one K/V head": ("qwen3", {"num_key_value_heads": 1}),
    "a head per K/V head": ("llama", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_lean_forward_equals_transformers(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    model = save_target(tmp_path, family, **settings)
    config = target_config(tmp_path)
    target = open_target(
        tmp_path,
        config,
        target_shape(config),
        (0, 2),
        256,
        torch.float32,
        torch.device("cpu"),
    )
    assert isinstance(target, LeanTarget)
    ids = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        stock = model(ids[None], output_hidden_states=True)
        taps = torch.cat([stock.hidden_states[1][0], stock.hidden_states[3][0]], dim=-1)
        at, logits, features = 0, [], []
        for rows in (17, 1, 8, 1, 3, 30):
            # A rejected block leaves nothing behind.
            target.forward(torch.full((5,), 7))
            target.features()
            states = target.forward(ids[at : at + rows])
            logits.append(target.logits(states))
            features.append(target.features())
            target.cache.advance(rows)
            if rows == 8:
                target.cache.crop(at + 4)
                target.forward(ids[at + 4 : at + 8])
                target.cache.advance(4)
                target.features()
            at += rows
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.cat(logits), stock.logits[0], rtol=1e-4, atol=5e-5)
    # The last layer's entry in transformers' list has passed the final norm already.
    torch.testing.assert_close(torch.cat(features)[:, :64], taps[:, :64], **close)


def test_what_counts_memory_knows_the_families() -> None:
    assert set(LEAN) == set(FAMILIES)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_beyond_fp16_are_kept_as_they_are(tied: bool, tmp_path: Path) -> None:
    save_target(tmp_path, "llama", tie_word_embeddings=tied)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][7] *= 1e6
    save_file(tensors, file, metadata={"format": "pt"})
    ids = {}
    for dtype in ("fp32", "fp16"):
        backend = open_pair(tmp_path, None, Options(dtype=dtype, context=64), lambda step: None)
        ids[dtype] = plain(backend, (5, 7, 9), 20)
    assert ids["fp16"] == ids["fp32"]
