"""The device-length cache and the path that is captured on CUDA, run here kernel by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends.torch_cache_device import DeviceCache  # noqa: E402
from dflash_local.backends.torch_config import target_config, target_shape  # noqa: E402
from dflash_local.backends.torch_graphs import GraphedTarget  # noqa: E402
from dflash_local.backends.torch_open_target import open_target  # noqa: E402
from tests.support.random_target import save_target  # noqa: E402


def opened(folder: Path, *, graphs: bool, context: int = 1024) -> Any:
    config = target_config(folder)
    return open_target(
        folder,
        config,
        target_shape(config),
        (0, 2),
        context,
        torch.float32,
        torch.device("cpu"),
        graphs=graphs,
    )


@pytest.mark.parametrize("window", [None, 16])
def test_both_caches_give_the_same_states(window: int | None, tmp_path: Path) -> None:
    save_target(tmp_path, "mistral", sliding_window=window)
    views, graphed = opened(tmp_path, graphs=False), opened(tmp_path, graphs=True)
    assert isinstance(graphed, GraphedTarget)
    ids = torch.randint(0, 128, (700,), generator=torch.Generator().manual_seed(2))
    at = 0
    with torch.inference_mode():
        for rows, kept in ((40, 40), (8, 3), (1, 1), (8, 8), (460, 460), (8, 8), (8, 2), (3, 3)):
            pair = []
            for target in (views, graphed):
                states = target.forward(ids[at : at + rows])
                pair.append((states.clone(), target.features().clone()))
                target.cache.advance(kept)
            for ours, theirs in zip(*pair, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            at += kept
        for target in (views, graphed):
            assert target.cache.crop(at - 5) == at - 5
        left, right = (t.forward(ids[at : at + 4]).clone() for t in (views, graphed))
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_inside_a_bucket_no_shape_and_no_address_changes(tmp_path: Path) -> None:
    save_target(tmp_path, "qwen3")
    target = opened(tmp_path, graphs=True)
    assert isinstance(target.cache, DeviceCache)
    seen: list[list[Any]] = []
    update = target.cache.update

    def note(key: Any, value: Any, layer: int) -> Any:
        keys, values = update(key, value, layer)
        seen[-1].append((key.shape, keys.shape, keys.data_ptr(), values.data_ptr()))
        return keys, values

    target.cache.update = note
    with torch.inference_mode():
        for step in range(100):
            seen.append([])
            target.forward(torch.full((4,), step))
            target.cache.advance(1 + step % 4)
    assert len({tuple(calls) for calls in seen[1:]}) == 1


def test_a_failed_capture_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_target(tmp_path, "qwen3")
    target = opened(tmp_path, graphs=True)

    def fail(device: object = None) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    target._capture = True
    with torch.inference_mode():
        before = target.forward(torch.tensor([5, 6])).clone()
        after = target.forward(torch.tensor([5, 6]))
    torch.testing.assert_close(before, after)
    assert target.failure == "operation not permitted when stream is capturing"
    assert target.graphs == 0
