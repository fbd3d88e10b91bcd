"""Sampled rounds on MLX wait once, like greedy ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local.sampling import SamplingParams
from tests.support.draft_files import speculators_pair, v2_pair
from tests.support.driving import PROMPT, one_round
from tests.support.kits import MlxKit, Options
from tests.support.tiny import loop_pair

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")


def reduced(folder: Path) -> tuple[Path, Path]:
    return speculators_pair(folder, version=2, kept=list(range(3, 90)))


@pytest.mark.parametrize("make", [loop_pair, v2_pair, reduced])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"branching": False},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "draft_temperature": 0.0},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
        {"temperature": 1.0, "acceptance": "compare"},
    ],
    ids=str,
)
def test_a_round_waits_once(
    make: Callable[[Path], tuple[Path, Path]],
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = MlxKit().open(*make(tmp_path), Options())
    backend.configure(SamplingParams(seed=1, **fields))
    backend.extend(PROMPT)
    pending = backend.sample()
    waits: Counter[str] = Counter()

    def counting(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            waits[name] += 1
            return inner(*args, **kwargs)

        return call

    for name in ("tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"):
        if hasattr(mx.array, name):
            monkeypatch.setattr(mx.array, name, counting(name, getattr(mx.array, name)))
    for count in (3, 3, 0, 1, 0, 3):
        waits.clear()
        pending = one_round(backend, pending, count).next
        assert waits == Counter(tolist=1)
