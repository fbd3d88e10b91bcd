"""Every architecture that the MLX backend runs, as a tiny random model in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.utils import load_model

from dflash_local.backend import BackendInfo
from dflash_local.backends.mlx_backend import MlxBackend
from dflash_local.backends.mlx_layers import LayeredTarget
from tests.support.driving import PROMPT, check_coverage, done, one_round, plain, run
from tests.support.mlx_models import CONFIGS, VOCAB, ScriptedDraft, random_target

TAPS = (0, 2)
PATTERN = (3, 0, 1, 5, 2, 0, 4)
BLOCK = 6
RECURRENT = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}

Opener = Callable[[ScriptedDraft | None], MlxBackend]


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    """Each architecture."""
    return str(request.param)


@pytest.fixture
def loaded(name: str, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """The library's model and config."""
    model, config = load_model(random_target(tmp_path, name))
    return model, config


@pytest.fixture
def open_target(loaded: tuple[Any, dict[str, Any]]) -> Opener:
    """Backends over one model; each has caches of its own."""

    def opener(draft: ScriptedDraft | None) -> MlxBackend:
        target = LayeredTarget(*loaded, TAPS if draft else ())
        info = BackendInfo(
            backend="mlx",
            target="random",
            draft="scripted" if draft else None,
            device="cpu",
            dtype="float32",
            quantization="none",
            vocab_size=VOCAB,
            block_size=BLOCK if draft else 1,
            context=512,
            stop_ids=(),
        )
        return MlxBackend(target, draft, info, cache_limit=1 << 28)

    return opener


def scripted(known: list[int], pattern: tuple[int, ...] = PATTERN) -> ScriptedDraft:
    return ScriptedDraft(known, pattern, len(TAPS) * 32)


def close(actual: mx.array, expected: mx.array) -> None:
    np.testing.assert_allclose(np.array(actual), np.array(expected), atol=2e-4, rtol=1e-3)


def test_layers_run_one_by_one_equal_the_librarys_forward(
    name: str, loaded: tuple[Any, dict[str, Any]]
) -> None:
    if name in ("qwen3_sliding", "mistral"):
        pytest.skip("the library leaves these sliding layers out; torch is the reference there")
    model, config = loaded
    ids = mx.random.randint(0, VOCAB, (60,), key=mx.random.key(7))
    expected = model(ids[None])[0]
    target = LayeredTarget(model, config, (0, 3))
    at = 0
    for rows in (20, 1, 1, 13, 5, 1, 19):
        result = target.forward(ids[at : at + rows])
        close(target.logits(result.hidden), expected[at : at + rows])
        assert result.features is not None
        close(target._trunk.norm(result.features[:, 32:]), result.hidden)
        at += rows
        target.history.advance(rows)


def test_speculative_ids_are_the_plain_ids(name: str, open_target: Opener) -> None:
    truth = plain(open_target(None), PROMPT, 130)
    assert len(set(truth)) > 5, "the answer must be varied"
    backend = open_target(scripted([*PROMPT, *truth]))
    end = done(run(backend, count=BLOCK - 1, max_tokens=120))
    assert end.tokens == tuple(truth[:120])
    assert 0 < end.stats.accepted < end.stats.drafted
    assert 2.5 < end.stats.tau < 4.5


@pytest.mark.parametrize("start", [10, 40])
@pytest.mark.parametrize("keep", [1, 3, 6])
def test_a_cut_block_leaves_the_state_of_a_fresh_prefill(
    name: str, open_target: Opener, keep: int, start: int
) -> None:
    truth = [*PROMPT, *plain(open_target(None), PROMPT, 60)]
    used, fresh = open_target(scripted(truth)), open_target(scripted(truth))
    used.extend(truth[:start])
    verdict = used.verify(used.propose(truth[start], 5))
    used.commit(keep)
    check_coverage(used)
    rows = [truth[start], *verdict.drafted][:keep]
    fresh.extend([*truth[:start], *rows])
    for ours, theirs in zip(used._target.history.layers, fresh._target.history.layers, strict=True):
        for a, b in zip(_seen(ours), _seen(theirs), strict=True):
            close(a, b)
    used.extend([5])
    fresh.extend([5])
    assert used.sample() == fresh.sample()


def _seen(cache: Any) -> list[mx.array]:
    """What the next query reads of a layer's cache."""
    arrays = cache.arrays()
    if not hasattr(cache, "peek"):
        return list(arrays)
    end = cache.offset - getattr(cache, "first", 0)
    low = end - cache.visible if hasattr(cache, "visible") else 0
    return [array[..., low:end, :] for array in arrays]


def test_rewind_reaches_what_it_says(name: str, open_target: Opener) -> None:
    truth = [*PROMPT, *plain(open_target(None), PROMPT, 200)]
    backend = open_target(scripted(truth))
    backend.extend(truth[:50])
    pending = backend.sample()
    while backend.position < 150:
        pending = one_round(backend, pending, 5).next
    for asked in (backend.position, 140, 60, 40, 20):
        reached = backend.rewind(asked)
        check_coverage(backend)
        assert reached == backend.position <= asked
        assert reached == asked or name in RECURRENT
        backend.extend(truth[reached : asked + 1])
        assert backend.sample() == truth[asked + 1]


def test_a_recurrent_target_goes_back_to_just_before_the_prompts_end(
    name: str, open_target: Opener
) -> None:
    truth = [*PROMPT, *plain(open_target(None), PROMPT, 220)]
    backend = open_target(scripted(truth))
    backend.extend(truth[:100])
    pending = backend.sample()
    for _ in range(4):
        pending = one_round(backend, pending, 5).next
    start = backend.position
    backend.extend(truth[start : start + 40])  # the second turn
    backend.extend(truth[start + 40 : start + 80])
    if name in RECURRENT:
        assert backend.rewind(start + 79) == start + 64
        assert backend.rewind(start + 60) == 84, "one mark per prefill, the first one's is left"
    reached = backend.rewind(95 if name not in RECURRENT else 84)
    assert reached == (84 if name in RECURRENT else 95)
    backend.extend(truth[reached:100])
    assert backend.sample() == truth[100]
