"""A draft that does not help: parked soon, and hardly slower than no draft at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local.backend import Backend
from dflash_local.backends.scripted import ByteTokenizer, ScriptedBackend, cycling, mixed_target
from dflash_local.costs import Costs
from dflash_local.engine import Engine, Opened
from dflash_local.events import Done, Round
from dflash_local.prompting import ChatTokenizer
from dflash_local.sampling import SamplingParams
from tests.support.clock import Clocked
from tests.support.width_play import TABLES

TOKENS = 512
COSTS = TABLES["avx512"]


def told(
    backend: Backend,
    tokenizer: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    costs: Costs = COSTS,
    tokens: int = TOKENS,
) -> tuple[list[Round], float]:
    """The rounds of an answer, and its speed over plain decoding."""
    clocked = Clocked(backend, costs, monkeypatch)
    with Engine(lambda: Opened(clocked, tokenizer, costs)) as engine:
        events = list(engine.stream("Tell me a story.", SamplingParams(max_tokens=tokens + 1)))
    rounds = [event for event in events if isinstance(event, Round)]
    end = events[-1]
    assert isinstance(end, Done)
    assert end.stats.decode_ms == pytest.approx(clocked.ms)
    return rounds, end.stats.tokens * costs.ms[0] / clocked.ms


@pytest.mark.parametrize("table", TABLES)
def test_a_script_that_is_never_right(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = TABLES[table]
    backend = ScriptedBackend(
        mixed_target(200), cycling((0,)), block_size=len(costs.ms), context=2048, stop_ids=()
    )
    rounds, speed = told(backend, ByteTokenizer(), monkeypatch, costs)
    assert sum(len(r.tokens) for r in rounds) == TOKENS
    assert any(r.parked for r in rounds[:40])
    assert speed >= 0.97


def random_weights(weights: dict[str, Any]) -> None:
    """Every matrix is noise of the size it had."""
    import torch

    torch.manual_seed(5)
    for name, weight in weights.items():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape) * weight.float().std()
            weights[name] = noise.to(weight.dtype)


def foreign_features(weights: dict[str, Any]) -> None:
    """The trained draft reads states that it does not know, as those of another target are."""
    import torch

    order = torch.randperm(weights["fc.weight"].shape[1], generator=torch.Generator())
    weights["fc.weight"] = weights["fc.weight"][:, order].contiguous()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "tokens"), [(random_weights, TOKENS // 4), (foreign_features, TOKENS // 8)]
)
def test_the_demo_target(
    spoil: Callable[[dict[str, Any]], None],
    tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``dflash-local bench --draft FOLDER --max-tokens 512`` is the same by a real clock."""
    pytest.importorskip("torch")
    import shutil

    from safetensors.torch import load_file, save_file

    from dflash_local import demo
    from dflash_local.backends.torch_load import open_pair
    from dflash_local.tokenizer import HubTokenizer
    from tests.support.kits import Options

    target = demo.ensure(lambda stage, done, total: None)
    draft = tmp_path / "draft"
    shutil.copytree(demo.draft_folder(), draft)
    weights = load_file(draft / "model.safetensors")
    spoil(weights)
    save_file(weights, draft / "model.safetensors")
    backend = open_pair(target, draft, Options(context=1024), lambda step: None)
    rounds, speed = told(backend, HubTokenizer(target), monkeypatch, tokens=tokens)
    assert any(r.parked for r in rounds[:40])
    assert speed >= 0.93  # in so short an answer; the scripts above run longer and keep more
