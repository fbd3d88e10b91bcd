from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_local import demo, fit, free_memory, memory_need, registry
from dflash_local.errors import DoesNotFit
from dflash_local.free_memory import Room, cpu_bf16
from dflash_local.target_shape import shape_of
from dflash_local.weights import folder_shapes
from tests.support.tiny import loop_pair

GB = 10**9
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None or not Path("/proc/self/clear_refs").exists(),
    reason="torch cannot be measured here",
)
needs_mlx = pytest.mark.skipif(
    find_spec("mlx") is None or find_spec("mlx_lm") is None, reason="MLX is not installed"
)


def _peak(backend: str, target: Path, draft: Path, context: int, dtype: str) -> int:
    command = [sys.executable, "-m", "tests.support.peak", backend]
    done = subprocess.run(
        [*command, str(target), str(draft), str(context), dtype],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        # What is freed goes back at once, so that the peak is what was needed, not what was kept.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout.splitlines()[-1]))


def _mlx_pair(folder: Path, kind: str) -> tuple[Path, Path]:
    """A random target and a draft. Eight layers, as of the last one only the end is computed."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from tests.support.mlx_models import CONFIGS, random_draft, random_model

    larger = {"max_position_embeddings": 65536, "num_hidden_layers": 8}
    config = {**CONFIGS[kind], **larger}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **larger}
    target = folder / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(random_model(config).parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    return target, random_draft(folder / "draft", [0, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "model", "context", "dtype"),
    [
        *(
            pytest.param("torch", model, context, dtype, marks=needs_torch)
            for model, context, dtype in (
                ("qwen3", 8192, "fp32"),
                ("qwen3", 8192, "fp16"),
                ("demo", 2048, "fp32"),
                ("demo", 2048, "fp16"),
                # Elsewhere bf16 is kept as fp16.
                *([("demo", 2048, "bf16"), ("qwen3", 8192, "bf16")] if cpu_bf16() else []),
            )
        ),
        *(
            pytest.param("mlx", model, context, "fp32", marks=needs_mlx)
            for model, context in (
                *(("qwen3", 1024), ("qwen3", 2048), ("qwen3_5", 1024), ("qwen3_5_moe", 2048)),
                ("demo", 64),
            )
        ),
    ],
)
def test_formula_is_within_10_percent_of_the_measured_peak(
    backend: str, model: str, context: int, dtype: str, tmp_path: Path
) -> None:
    if model == "demo":
        target, draft = demo.installed(), demo.draft_folder()
        if target is None:
            pytest.skip("the demo target is not here")
    elif model == "qwen3":
        target, draft = loop_pair(tmp_path, {"max_position_embeddings": 65536})
    else:
        target, draft = _mlx_pair(tmp_path, model)
    peak = _peak(backend, target, draft, context, dtype)
    need = fit.fit(target, draft, backend=backend, dtype=dtype, context=context).need
    assert need.total == pytest.approx(peak, rel=0.1), need


def test_largest_context_is_the_last_that_fits(tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path, {"max_position_embeddings": 65536})

    def ask(context: int | None, free: int) -> fit.Fit:
        space = Room("cpu", "a test", free, free)
        return fit.fit(target, draft, backend="torch", dtype="fp32", context=context, free=space)

    most = ask(65536, 20_000_000).largest_context
    assert 256 < most < 65536
    assert ask(most, 20_000_000).fits
    assert not ask(most + 1, 20_000_000).fits
    assert ask(None, GB).context == fit.DEFAULT_CONTEXT
    assert ask(None, GB).largest_context > ask(None, GB // 4).largest_context
    assert ask(None, 1000).largest_context == 0


def test_load_refuses_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local import load

    target, draft = loop_pair(tmp_path, {"max_position_embeddings": 65536})
    small = Room("cpu", "the test's memory", 20_000_000, 20_000_000)
    monkeypatch.setattr(fit, "room", lambda backend: small)
    with pytest.raises(
        DoesNotFit, match=r"K/V for 65,536 tokens .* 20 MB free on the test"
    ) as caught:
        load(target, draft=draft, context=65536, backend="torch")
    assert "Use --context " in caught.value.next_step
    monkeypatch.setenv("DFLASH_FIT", "off")
    assert fit.check(target, draft, backend="torch", context=65536) is None


def _room(kind: str, *, bf16: bool = True, packs: tuple[str, ...] = ()) -> Room:
    return Room(kind, f"a test's {kind}", 100 * GB, 100 * GB, native_bf16=bf16, packs=packs)


@pytest.mark.parametrize("bf16", [True, False])
def test_packed_weights_of_a_cpu_are_a_second_copy(tmp_path: Path, bf16: bool) -> None:
    """By rule: a tied head's packed order lies beside the rows that are looked up."""
    target, draft = loop_pair(tmp_path, {"tie_word_embeddings": True})

    def weights(*packs: str) -> int:
        found = _room("cpu", bf16=bf16, packs=packs)
        return fit.fit(target, draft, backend="torch", free=found).need.weights

    own, other = ("bf16", "fp32") if bf16 else ("fp32", "bf16")
    assert weights(own) - weights() == (2 if bf16 else 4) * 128 * 64
    assert weights(other) == weights()


def test_a_cpu_that_halves_weights_does_not_halve_what_it_computes(tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path)
    older = Room("cpu", "a test's cpu", 100 * GB, 100 * GB, native_bf16=False, halves=True)

    def need(**options: object) -> memory_need.Need:
        return fit.fit(target, draft, backend="torch", free=older, **options).need  # type: ignore[arg-type]

    assert need() == need(dtype="fp16")
    assert need().cache == need(dtype="fp32").cache == 2 * need(dtype="bf16").cache
    products = sum(
        2 * shape[0] * 512  # a block of columns each, as every matrix here has fewer
        for name, shape in folder_shapes(target).items()
        if len(shape) > 1 and "embed_tokens" not in name
    )
    norms = sum(4 * shape[0] for shape in folder_shapes(target).values() if len(shape) == 1)
    assert need().weights == products + norms + 2 * 128 * 64
    newer = replace(older, native_bf16=True)
    assert fit.fit(target, draft, backend="torch", free=newer).need.cache < need().cache


def test_what_transformers_loads_is_counted_before_it_is_stored_smaller(tmp_path: Path) -> None:
    """Such a family is there in the type of its states first, and product by product in another."""
    target, draft = loop_pair(tmp_path)
    config = json.loads((target / "config.json").read_text())
    older = Room("cpu", "a test's cpu", 100 * GB, 100 * GB, native_bf16=False, halves=True)

    def need(family: str, **options: object) -> memory_need.Need:
        (target / "config.json").write_text(json.dumps({**config, "model_type": family}))
        return fit.fit(target, draft, backend="torch", free=older, context=16, **options).need  # type: ignore[arg-type]

    whole = 4 * sum(math.prod(shape) for shape in folder_shapes(target).values())
    for options in ({}, {"quantize": "nf4"}, {"dtype": "fp32"}):
        told = need("gemma3_text", **options)
        assert told.weights + told.cache + told.draft_cache + told.workspace >= whole
    assert need("qwen3", quantize="nf4").total < 0.7 * need("gemma3_text", quantize="nf4").total


def test_numbers_that_a_config_lists_layer_by_layer() -> None:
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    listed = shape_of({**config, "per_layer_config": {"1": {"head_dim": 32}}})
    assert listed == shape_of({**config, "global_head_dim": 32})
    assert (listed.head_dim, listed.window_head_dim) == (32, 16)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_light_drafts_own_embedding_stays_as_wide_as_its_states(
    dtype: str, tmp_path: Path
) -> None:
    target, draft = loop_pair(tmp_path)
    room = Room("cpu", "a test's cpu", 100 * GB, 100 * GB, dtype == "bf16", True)
    asked = {"backend": "torch", "dtype": dtype, "free": room}
    before = fit.fit(target, draft, **asked).need.draft  # type: ignore[arg-type]
    tensors = load_file(draft / "model.safetensors")
    rows = np.zeros((128, tensors["norm.weight"].shape[0]), dtype=np.float32)
    save_file({**tensors, "embed_tokens.weight": rows}, draft / "model.safetensors")
    after = fit.fit(target, draft, **asked).need.draft  # type: ignore[arg-type]
    assert after - before == rows.size * (2 if dtype == "bf16" else 4)


def test_what_a_card_quantises_by_itself_is_counted_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = loop_pair(tmp_path)

    def need(**options: object) -> memory_need.Need:
        return fit.fit(target, draft, backend="torch", free=_room("cuda"), **options).need  # type: ignore[arg-type]

    monkeypatch.setattr("dflash_local.weight_bytes.find_spec", lambda name: object())
    assert need() == need(quantize="nf4")
    assert need().weights < 0.5 * need(quantize="none").weights
    assert need(draft_bits=16).draft > 3 * need().draft
    monkeypatch.setattr("dflash_local.weight_bytes.find_spec", lambda name: None)
    assert need() == need(quantize="none")


def test_options_that_the_loader_refuses_are_left_to_it(tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path)
    for backend in ("torch", "mlx"):
        plain = fit.fit(target, draft, backend=backend, free=_room("metal")).need
        odd = {"quantize": "3bit", "dtype": "fp7", "draft_bits": 5}
        assert fit.fit(target, draft, backend=backend, free=_room("metal"), **odd).need == plain  # type: ignore[arg-type]


def test_metal_holds_no_scores_where_its_kernel_is_fused(tmp_path: Path) -> None:
    small, draft = loop_pair(tmp_path / "a")
    fused, _ = loop_pair(tmp_path / "b", {"head_dim": 64})

    def workspace(target: Path) -> int:
        return fit.fit(
            target, draft, backend="mlx", free=_room("metal"), context=256
        ).need.workspace

    assert workspace(fused) < workspace(small)


def test_sliding_layers_stop_growing(tmp_path: Path) -> None:
    slides = {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 128,
        "max_position_embeddings": 65536,
    }
    target, draft = loop_pair(tmp_path, slides)
    for backend in ("torch", "mlx"):

        def cache(context: int, backend: str = backend) -> int:
            found = _room("cpu", bf16=False)
            asked = fit.fit(target, draft, backend=backend, context=context, free=found)
            return asked.need.cache

        assert 1.4 < cache(65536) / cache(32768) < 2.1
        assert cache(2048) > 0.5 * cache(4096)


def test_pairs_of_the_registry_before_download(
    private_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = registry.find("qwen3-8b")
    big = next(t for t in pair.targets if t.weights == "bf16")
    monkeypatch.setattr(fit, "room", lambda backend: _room("cpu", bf16=True))
    asked = fit.fit_pair(pair, big, backend="torch")
    assert asked is not None
    assert 16 * GB < asked.need.total < 22 * GB
    eight = next(t for t in pair.targets if t.weights == "8bit")
    derived = fit.fit_pair(pair, eight, backend="mlx")
    assert derived is not None
    assert 10 * GB < derived.need.total < 13 * GB, "its size follows from its parameters"
    unsure = next(t for t in pair.targets if "unsloth" in t.repo)
    assert fit.fit_pair(pair, unsure, backend="torch") is None, "its size is not known"


@pytest.mark.parametrize("name", ["qwen3.5-27b", "qwen3.6-35b-a3b", "gemma-4-31b", "gpt-oss-20b"])
def test_most_pairs_can_be_judged_before_download(
    private_folders: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pair = registry.find(name)
    monkeypatch.setattr(fit, "room", lambda backend: _room("metal"))
    asked = fit.fit_pair(pair, pair.targets[0], backend="mlx")
    assert asked is not None
    assert asked.fits


def test_memory_of_this_machine_is_known() -> None:
    free, total = free_memory.ram()
    assert 0 < free <= total
