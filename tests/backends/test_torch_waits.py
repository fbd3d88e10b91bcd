"""A round on torch reads the device once: nothing before the verdict asks for a value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local.sampling import SamplingParams
from tests.support.draft_files import speculators_pair, v2_pair
from tests.support.driving import PROMPT
from tests.support.kits import Options, TorchKit
from tests.support.tiny import loop_pair

torch = pytest.importorskip("torch")

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, seed=1),
    SamplingParams(temperature=1.0, draft_temperature=0.0, seed=1),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.1, seed=1),
    SamplingParams(temperature=1.0, acceptance="compare", seed=1),
]


def reduced(folder: Path) -> tuple[Path, Path]:
    return speculators_pair(folder, version=2, kept=list(range(3, 90)))


@pytest.mark.parametrize("make", [loop_pair, v2_pair, reduced])
@pytest.mark.parametrize("sampling", SETTINGS, ids=range(len(SETTINGS)))
def test_no_operator_asks_for_a_value(
    make: Callable[[Path], tuple[Path, Path]], sampling: SamplingParams, tmp_path: Path
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    asked: list[str] = []

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "unique", "equal")):
            asked.append(name)
        return func(*args, **(kwargs or {}))

    mode: Any = TorchDispatchMode
    watch = type("Watch", (mode,), {"__torch_dispatch__": dispatch})
    backend = TorchKit().open(*make(tmp_path), Options())
    backend.configure(sampling)
    backend.extend(PROMPT)
    pending = backend.sample()
    with watch():
        for _ in range(3):
            verdict = backend.verify(backend.propose(pending, 3))
            backend.commit(verdict.accepted + 1)
            pending = verdict.next
    assert asked == []
