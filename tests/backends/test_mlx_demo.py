"""The real demo pair on MLX: the same ids with and without the draft, and packed as it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_local import demo
from dflash_local.backends.mlx_load import open_pair
from dflash_local.backends.mlx_weights import load_target
from dflash_local.tokenizer import HubTokenizer
from tests.support.driving import done, run
from tests.support.kits import Options

pytestmark = pytest.mark.slow

QUESTION = "Write three short tips for learning to cook."


@pytest.fixture(scope="module")
def folder() -> Path:
    """The demo target."""
    return demo.ensure(lambda stage, done, total: None)


def test_ids_with_and_without_the_draft(folder: Path) -> None:
    tokenizer = HubTokenizer(folder)
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": QUESTION}], None))
    options = Options(dtype="fp32", context=1024)
    backend = open_pair(folder, demo.draft_folder(), options, lambda step: None)
    speculative = done(run(backend, prompt, count=7, max_tokens=16))
    plain = done(run(backend, prompt, count=0, max_tokens=16))
    backend.close()
    print(f"tau {speculative.stats.tau:.2f}: {tokenizer.decode(speculative.tokens)!r}")
    assert speculative.tokens == plain.tokens
    assert speculative.stats.tau > 1.5


def test_the_blocks_are_taken_as_they_are(folder: Path) -> None:
    packed, config = load_target(folder, Options(dtype="fp32", quantize="4bit"))
    dense, _ = load_target(folder, Options(dtype="fp32"))
    assert config["quantization"]["bits"] == 4
    expected = dict(tree_flatten(dense.parameters()))
    modules: dict[str, Any] = dict(packed.named_modules())
    checked = 0
    for name, module in modules.items():
        if "scales" not in module or not ("layers.3." in name or name.endswith("embed_tokens")):
            continue
        values = mx.dequantize(
            module.weight, module.scales, module.biases, group_size=32, bits=module.bits
        )
        np.testing.assert_array_equal(np.array(values), np.array(expected[f"{name}.weight"]))
        checked += 1
    assert checked == 8
    ids = mx.array([[1, 9690, 198]])
    ours, theirs = np.array(packed(ids)), np.array(dense(ids))
    np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=1e-3)
