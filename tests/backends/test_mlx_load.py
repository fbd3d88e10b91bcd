"""What the MLX loader accepts, refuses and chooses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx

from dflash_local.backend import Backend
from dflash_local.backends import mlx_load
from dflash_local.backends.mlx_load import open_pair
from dflash_local.backends.mlx_packed import unpack_blocks
from dflash_local.backends.mlx_weights import draft_dtype
from dflash_local.errors import (
    BackendUnavailable,
    DflashError,
    DraftMismatch,
    OptionError,
    WeightsError,
)
from tests.support.draft_files import v2_pair
from tests.support.driving import PROMPT, done, plain, run
from tests.support.kits import Options
from tests.support.mlx_models import random_draft, random_target
from tests.support.tiny import loop_pair


def load(target: Path, draft: Path | None = None, **options: Any) -> Backend:
    backend: Backend = open_pair(target, draft, Options(**options), lambda step: None)
    return backend


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(kind: type[DflashError], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert "\n" not in caught.value.cause


def test_a_machine_without_mlx_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    refused(BackendUnavailable, "dflash-local[mlx]", lambda: load(target, draft))
    monkeypatch.setattr(mlx_load.sys, "platform", "win32")
    monkeypatch.setattr(mlx_load.platform, "system", lambda: "Windows")
    refused(BackendUnavailable, "does not run on Windows", lambda: load(target, draft))
    monkeypatch.setattr(mlx_load.sys, "platform", "darwin")
    monkeypatch.setattr(mlx_load.platform, "machine", lambda: "x86_64")
    refused(BackendUnavailable, "Apple Silicon", lambda: load(target, draft))


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.pt", "weights.pkl"])
@pytest.mark.parametrize("which", [0, 1])
def test_other_weights_than_safetensors_are_refused(tmp_path: Path, name: str, which: int) -> None:
    folders = loop_pair(tmp_path)
    (folders[which] / "model.safetensors").rename(folders[which] / name)
    refused(WeightsError, name, lambda: load(*folders))


@pytest.mark.parametrize("key", ["auto_map", "model_file"])
@pytest.mark.parametrize("which", [0, 1])
def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, key: str, which: int) -> None:
    folders = loop_pair(tmp_path)
    (folders[which] / "own.py").write_text("raise SystemExit('it was run')")
    edit(folders[which], **{key: "own.py" if key == "model_file" else {"AutoModel": "own.Model"}})
    refused(WeightsError, key, lambda: load(*folders))


def test_a_draft_for_another_target_is_refused(tmp_path: Path) -> None:
    target = random_target(tmp_path / "target", "qwen3")
    wide = random_draft(tmp_path / "wide", (0, 2), hidden=48)
    refused(DraftMismatch, "48", lambda: load(target, wide))
    deep = random_draft(tmp_path / "deep", (0, 4))
    refused(DraftMismatch, "layer 4", lambda: load(target, deep))
    masked = random_draft(tmp_path / "masked", (0, 2))
    edit(masked, dflash_config={"mask_token_id": 500, "target_layer_ids": [0, 2]})
    refused(DraftMismatch, "500", lambda: load(target, masked))


def test_drafts_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    target, _ = loop_pair(tmp_path)
    other = random_draft(tmp_path / "other", (0, 2))
    edit(other, architectures=["Eagle3DraftModel"])
    refused(WeightsError, "EAGLE", lambda: load(target, other))


def test_a_damaged_or_unknown_target_is_refused(tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path)
    edit(target, model_type="no_such_model")
    refused(WeightsError, "no_such_model", lambda: load(target, draft))
    target, draft = loop_pair(tmp_path)
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(WeightsError, "header says", lambda: load(target, draft))
    target, draft = loop_pair(tmp_path)
    edit(target, hidden_size=48)
    refused(WeightsError, "cannot be loaded", lambda: load(target))


def test_options_that_cannot_be_honoured_are_refused(tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path)
    wrong: dict[str, dict[str, Any]] = {
        "int3": {"dtype": "int3"},
        "3 bits": {"draft_bits": 3},
        "nf4": {"quantize": "nf4"},
        "100000": {"context": 100000},
    }
    for words, options in wrong.items():
        refused(OptionError, words, partial(load, target, draft, **options))


def test_a_state_that_cannot_be_rolled_back_leaves_plain_decoding(tmp_path: Path) -> None:
    target = random_target(tmp_path / "target", "mamba2")
    draft = random_draft(tmp_path / "draft", (0, 2))
    refused(DraftMismatch, "ArraysCache", lambda: load(target, draft))
    backend = load(target)
    truth = plain(backend, PROMPT, 60)
    assert done(run(backend, count=3, max_tokens=60)).tokens == tuple(truth)
    assert "plain decoding only" in " ".join(backend.info.kernels)
    known = [*PROMPT, *truth]
    backend.rewind(0)
    backend.extend(known[:50])
    assert backend.rewind(49) == 34
    backend.extend(known[34:50])
    assert backend.sample() == known[50]


def test_another_architecture_runs_plainly(tmp_path: Path) -> None:
    target = random_target(tmp_path / "target", "olmo2")
    backend = load(target)
    truth = plain(backend, PROMPT, 40)
    assert backend.rewind(20) == 20
    backend.extend([*PROMPT, *truth][20:30])
    assert backend.sample() == truth[22]
    refused(DraftMismatch, "olmo2", lambda: load(target, random_draft(tmp_path / "draft", (0, 2))))


def test_a_packed_version_2_draft_keeps_its_selector(tmp_path: Path) -> None:
    backend = load(*v2_pair(tmp_path), draft_bits=8)
    assert done(run(backend, max_tokens=40)).tokens == tuple(plain(backend, PROMPT, 40))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_draft_changes_proposals_only(tmp_path: Path, bits: int) -> None:
    target, draft = loop_pair(tmp_path)
    plain_ids = plain(load(target), PROMPT, 40)
    backend = load(target, draft, draft_bits=bits)
    end = done(run(backend, max_tokens=40))
    assert end.tokens == tuple(plain_ids)
    assert end.stats.accepted > 5
    assert f"packed to {bits} bits" in " ".join(backend.info.kernels)
    assert backend.memory().draft < load(target, draft).memory().draft


def test_a_quantised_target_decodes_speculatively(tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path)
    backend = load(target, draft, quantize="8bit")
    assert backend.info.quantization == "8-bit g64"
    assert done(run(backend, max_tokens=30)).tokens == tuple(plain(backend, PROMPT, 30))


def test_chips_without_bf16_run_packed_drafts_in_fp32() -> None:
    for chip in ("applegpu_g13s", "applegpu_g14d"):
        assert draft_dtype(chip, 4, mx.bfloat16) == mx.float32
        assert draft_dtype(chip, 8, mx.float16) == mx.float32
        assert draft_dtype(chip, None, mx.bfloat16) == mx.bfloat16
    for chip in ("applegpu_g15s", "applegpu_g17p", "x86_64"):
        assert draft_dtype(chip, 4, mx.bfloat16) == mx.bfloat16
    assert draft_dtype("applegpu_g15s", None, mx.float16) == mx.bfloat16
    assert draft_dtype("applegpu_g15s", None, mx.float32) == mx.float32


def test_a_draft_with_an_embedding_and_a_head_of_its_own_uses_them(tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path)
    ids = [done(run(load(target, draft), max_tokens=40)).stats.accepted]
    tensors: Any = mx.load(str(target / "model.safetensors"))
    extra: Any = mx.load(str(draft / "model.safetensors"))
    extra["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    extra["lm_head.weight"] = tensors["lm_head.weight"]
    mx.eval(extra)
    mx.save_safetensors(str(draft / "model.safetensors"), extra)
    assert done(run(load(target, draft), max_tokens=40)).stats.accepted == ids[0]
    extra["lm_head.weight"] = -extra["lm_head.weight"]
    mx.save_safetensors(str(draft / "model.safetensors"), extra)
    assert done(run(load(target, draft), max_tokens=40)).stats.accepted < ids[0]


def test_stop_ids_and_context_come_from_the_files(tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path, {"eos_token_id": 5})
    assert load(target, draft).info.stop_ids == (5,)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    info = load(target, draft, context=None).info
    assert info.stop_ids == (7, 8)
    assert info.context == 256
    assert (info.dtype, info.quantization, info.block_size) == ("fp32", "none", 4)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_1", 4), ("Q8_0", 8)])
def test_blocks_of_a_gguf_file_keep_their_exact_values(kind: str, bits: int) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    values = np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32)
    blocks = quantize(values, GGMLQuantizationType[kind])
    weight, scales, offsets = unpack_blocks(blocks, bits)
    ours = mx.dequantize(
        weight, scales.astype(mx.float32), offsets.astype(mx.float32), group_size=32, bits=bits
    )
    theirs = dequantize(blocks, GGMLQuantizationType[kind])
    np.testing.assert_array_equal(np.array(ours), theirs)
