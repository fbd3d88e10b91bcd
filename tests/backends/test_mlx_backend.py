"""How the MLX backend works inside: waits, memory, threads, failures, and agreement with torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.utils import load_model

from dflash_local.backends import mlx_attention, mlx_host
from dflash_local.backends.mlx_backend import MlxBackend
from dflash_local.backends.mlx_layers import LayeredTarget
from dflash_local.backends.mlx_load import open_pair
from dflash_local.backends.scripted import ByteTokenizer
from dflash_local.engine import Engine
from dflash_local.errors import EngineError
from dflash_local.sampling import SamplingParams
from tests.support.driving import PROMPT, done, one_round, plain, run
from tests.support.kits import Options
from tests.support.mlx_models import random_draft, random_target
from tests.support.tiny import loop_pair

WAITS = ("tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__")


def load(target: Path, draft: Path | None, **options: Any) -> MlxBackend:
    backend = open_pair(target, draft, Options(**options), lambda step: None)
    assert isinstance(backend, MlxBackend)
    return backend


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[MlxBackend]:
    """The fitted tiny pair."""
    opened = load(*loop_pair(tmp_path))
    yield opened
    opened.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts every way in which the host can wait for the device."""
    counted: Counter[str] = Counter()

    def counting(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return inner(*args, **kwargs)

        return call

    array: Any = mx.array
    for name in WAITS:
        if hasattr(array, name):
            monkeypatch.setattr(array, name, counting(name, getattr(array, name)))
    for name in ("eval", "synchronize"):
        monkeypatch.setattr(mx, name, counting(name, getattr(mx, name)))
    for module in (mlx_host, *(m for m in _modules() if hasattr(m, "wait"))):
        monkeypatch.setattr(module, "wait", counting("eval", mlx_host.wait))
    return counted


def _modules() -> list[Any]:
    from dflash_local.backends import mlx_backend, mlx_draft, mlx_pair

    return [mlx_backend, mlx_draft, mlx_pair]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.1),
    ],
    ids=["greedy", "sampled", "penalised"],
)
def test_a_round_waits_once(
    backend: MlxBackend, waits: Counter[str], sampling: SamplingParams
) -> None:
    backend.configure(sampling)
    backend.extend(PROMPT)
    pending = backend.sample()
    assert waits["tolist"] == 1, "the counter counts"
    for count in (3, 3, 0, 1, 3, 0, 0, 2, 3, 3):
        waits.clear()
        pending = one_round(backend, pending, count).next
        assert waits == Counter(tolist=1)


def test_proposing_and_committing_never_wait(backend: MlxBackend, waits: Counter[str]) -> None:
    backend.extend(PROMPT)
    pending = backend.sample()
    waits.clear()
    proposal = backend.propose(pending, 3)
    assert not waits
    verdict = backend.verify(proposal)
    waits.clear()
    backend.commit(verdict.accepted + 1)
    assert not waits


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_memory_is_flat_over_fifty_turns(tmp_path: Path, name: str) -> None:
    target = random_target(tmp_path / "target", name)
    backend = load(target, random_draft(tmp_path / "draft", taps=(0, 2)))
    prompt = [(17 * i * i + 5 * i) % 128 for i in range(70)]
    peaks, actives = [], []
    for _ in range(50):
        mx.reset_peak_memory()
        backend.rewind(64)
        backend.extend(prompt[backend.position :])
        pending = backend.sample()
        for index in range(8):
            pending = one_round(backend, pending, 3 * (index % 2)).next
        mx.synchronize()
        peaks.append(mx.get_peak_memory())
        actives.append(mx.get_active_memory())
    assert max(peaks[5:]) <= 1.02 * max(peaks[:5])
    assert max(actives[5:]) <= 1.02 * max(actives[:5])


def test_an_engine_generates_off_the_main_thread(tmp_path: Path) -> None:
    folders = loop_pair(tmp_path)
    truth = plain(load(*folders), PROMPT, 30)
    with Engine(lambda: (load(*folders), ByteTokenizer())) as engine:
        sampling = SamplingParams(max_tokens=30)
        assert engine.complete(list(PROMPT), sampling).tokens == tuple(truth)
        assert engine.complete(list(PROMPT), sampling, block=1).tokens == tuple(truth)


def test_two_targets_over_one_model_have_taps_of_their_own(tmp_path: Path) -> None:
    model, config = load_model(random_target(tmp_path, "llama"))
    one, two, none = (LayeredTarget(model, config, taps) for taps in ((1,), (0, 3), ()))
    ids = mx.array(PROMPT)
    first, second = one.forward(ids).features, two.forward(ids).features
    assert first is not None
    assert second is not None
    assert (first.shape[1], second.shape[1]) == (32, 64)
    assert none.forward(ids).features is None
    again = one.forward(ids)
    assert again.features is not None


@pytest.mark.parametrize("stage", ["propose", "verify", "commit"])
def test_a_failed_round_is_mended_by_a_rewind(
    backend: MlxBackend, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    truth = plain(backend, PROMPT, 20)
    backend.rewind(0)
    backend.extend(PROMPT)
    pending = backend.sample()

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        if stage == "propose":
            patch.setattr(backend._draft, "branch", fail)
        elif stage == "verify":
            patch.setattr(backend._target, "logits", fail)
        else:
            patch.setattr(backend._draft, "append", fail)
        with pytest.raises(RuntimeError):
            one_round(backend, pending, 3)
    with pytest.raises(EngineError):
        backend.propose(pending, 3)
    with pytest.raises(EngineError):
        backend.extend(PROMPT)
    assert backend.rewind(5) == 0
    assert done(run(backend, max_tokens=20)).tokens == tuple(truth)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "qwen3_sliding"])
def test_torch_and_mlx_give_the_same_ids(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    from dflash_local.backends import torch_load

    target = random_target(tmp_path / "target", name)
    draft = random_draft(tmp_path / "draft", taps=(0, 2))
    ours = load(target, draft)
    theirs = torch_load.open_pair(target, draft, Options(), lambda step: None)
    for prompt in (PROMPT, PROMPT[:3], (1, 2, 3, 4, 5) * 8):
        for count in (0, 3):
            a = [e for e in run(ours, prompt, count=count, max_tokens=60)]
            b = [e for e in run(theirs, prompt, count=count, max_tokens=60)]
            assert done(a).tokens == done(b).tokens
    for backend in (ours, theirs):
        backend.configure(SamplingParams(branching=False))
        backend.rewind(0)
        backend.extend(PROMPT)
    drafted = [one_round(backend, 9, 3).drafted for backend in (ours, theirs)]
    assert drafted[0] == drafted[1]


def test_plain_rounds_keep_features_for_the_draft_in_bounds(backend: MlxBackend) -> None:
    backend.extend(PROMPT)
    pending = backend.sample()
    for _ in range(5):
        pending = one_round(backend, pending, 0).next
    assert backend.coverage.pending == 5
    assert backend.rewind(10) == 10
    assert backend.coverage.pending == 2
    backend.extend((5,))
    assert backend.coverage.pending == 0
    assert backend.coverage.draft == 11


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_narrow_calls_is_the_same(
    monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    query = mx.random.normal((1, 8, 16, 8), key=mx.random.key(0))
    keys = mx.random.normal((1, 2, 50, 8), key=mx.random.key(1))
    mask = (mx.arange(50)[None] < mx.arange(34, 50)[:, None]) if masked else None
    whole = mlx_attention.attention(query, keys, keys, 0.3, mask)
    monkeypatch.setattr(mlx_attention, "LONG", 10)
    split = mlx_attention.attention(query, keys, keys, 0.3, mask)
    np.testing.assert_allclose(np.array(whole), np.array(split), atol=1e-5)


def test_time_and_memory_of_a_round_do_not_grow_with_its_number(backend: MlxBackend) -> None:
    backend.extend(PROMPT)
    pending, sizes = backend.sample(), []
    while backend.position < 240:
        pending = one_round(backend, pending, 3).next
        sizes.append(sum(a.size for a in backend._state()))
    assert len(set(sizes)) == 1, "buffers grow in steps, never by the round"
