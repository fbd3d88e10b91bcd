from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dflash_local import demo, fit, free_memory, registry
from dflash_local.errors import DoesNotFit
from dflash_local.free_memory import Room
from tests.support.tiny import loop_pair

GB = 10**9
BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            find_spec(name) is None
            or find_spec(f"dflash_local.backends.{name}_load") is None
            or (name == "mlx" and sys.platform != "darwin")  # its CPU build takes minutes here
            or (name == "torch" and not Path("/proc/self/clear_refs").exists()),
            reason=f"{name} cannot be measured here",
        ),
    )
    for name in ("torch", "mlx")
]


def _peak(backend: str, target: Path, draft: Path, context: int) -> int:
    command = [sys.executable, "-m", "tests.support.peak", backend]
    done = subprocess.run(
        [*command, str(target), str(draft), str(context)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        # What is freed goes back at once, so that the peak is what was needed, not what was kept.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("model", "context"), [("tiny", 8192), ("tiny", 16384), ("demo", 1024), ("demo", 4096)]
)
def test_formula_is_within_10_percent_of_the_measured_peak(
    backend: str, model: str, context: int, tmp_path: Path
) -> None:
    if model == "demo":
        target, draft = demo.installed(), demo.draft_folder()
        if target is None:
            pytest.skip("the demo target is not here")
    else:
        target, draft = loop_pair(tmp_path, {"max_position_embeddings": 65536})
    peak = _peak(backend, target, draft, context)
    need = fit.fit(target, draft, backend=backend, dtype="fp32", context=context).need
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


def test_pairs_of_the_registry_before_download(private_folders: Path) -> None:
    pair = registry.find("qwen3-8b")
    big = next(t for t in pair.targets if t.weights == "bf16")
    asked = fit.fit_pair(pair, big, backend="torch")
    assert asked is not None
    assert 16 * GB < asked.need.total < 22 * GB
    assert fit.fit_pair(pair, pair.targets[1], backend="mlx") is None, "its size is not known"


def test_memory_of_this_machine_is_known() -> None:
    free, total = free_memory.ram()
    assert 0 < free <= total
