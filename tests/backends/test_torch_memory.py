"""Running out of memory: said with what to try, and the engine goes on."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends import torch_load, torch_memory  # noqa: E402
from dflash_local.backends.scripted import ByteTokenizer  # noqa: E402
from dflash_local.backends.torch_backend import TorchBackend  # noqa: E402
from dflash_local.backends.torch_draft import TorchDraft  # noqa: E402
from dflash_local.backends.torch_lean import LeanTarget  # noqa: E402
from dflash_local.backends.torch_load import open_pair  # noqa: E402
from dflash_local.engine import Engine  # noqa: E402
from dflash_local.errors import DoesNotFit, EngineError  # noqa: E402
from dflash_local.sampling import SamplingParams  # noqa: E402
from tests.support.driving import PROMPT, plain  # noqa: E402
from tests.support.kits import Options  # noqa: E402
from tests.support.tiny import loop_pair  # noqa: E402

CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB."
CPU_SAYS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
THREE = ("smaller --context", "--quantize nf4", "smaller model")


def opened(pair: tuple[Path, Path], *, graphs: bool = False) -> TorchBackend:
    backend: TorchBackend = open_pair(*pair, Options(), lambda step: None, graphs=graphs)
    return backend


class Failing:
    """A method that runs out of memory at one call and works at all others."""

    def __init__(self, owner: Any, name: str, at: int, patch: pytest.MonkeyPatch) -> None:
        inner, self.calls = getattr(owner, name), 0

        def method(target: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise torch.OutOfMemoryError(CUDA_SAYS)
            return inner(target, *args, **kwargs)

        patch.setattr(owner, name, method)


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (LeanTarget, "forward", 1),
        (LeanTarget, "forward", 5),
        (LeanTarget, "logits", 4),
        (TorchDraft, "hidden", 3),
        (TorchDraft, "project", 1),
        (TorchDraft, "project", 4),
    ],
)
@pytest.mark.parametrize("graphs", [False, True], ids=["views", "fixed"])
def test_an_answer_that_runs_out_is_told_and_the_next_one_is_right(
    owner: Any, name: str, at: int, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(loop_pair(tmp_path), graphs=graphs)
    truth = plain(backend, PROMPT, 30)
    settings = SamplingParams(max_tokens=30)
    with Engine(lambda: (backend, ByteTokenizer())) as engine:
        with monkeypatch.context() as patch:
            Failing(owner, name, at, patch)
            with pytest.raises(EngineError, match="Out of memory on cpu") as told:
                engine.complete(PROMPT, settings, block=4)
        assert all(advice in str(told.value) for advice in THREE)
        for _ in range(2):
            assert engine.complete(PROMPT, settings, block=4).tokens == tuple(truth)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA_SAYS), RuntimeError(CPU_SAYS)])
def test_a_load_that_runs_out_gives_back_what_it_had(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = loop_pair(tmp_path)
    held: list[Any] = []

    def fail(folder: Any, config: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        held.append(weakref.ref(target))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch_load, "load_draft", fail)
        with pytest.raises(EngineError, match="does not fit into the memory of cpu") as told:
            opened(pair)
    assert all(advice in str(told.value) for advice in THREE)
    gc.collect()
    # While the error is still there to be shown.
    assert held[0]() is None
    assert len(plain(opened(pair), PROMPT, 5)) == 5


def test_other_errors_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr(torch_load, "load_draft", fail)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        opened(loop_pair(tmp_path))


GIB = 2**30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An 8 GB card, 6 of them free."""
    numbers: dict[str, Any] = {"free": 6 * GIB, "total": 8 * GIB, "reserved": 0}
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda d: (numbers["free"], numbers["total"]))
    monkeypatch.setattr(cuda, "get_device_name", lambda d: "a card")
    monkeypatch.setattr(cuda, "memory_reserved", lambda d: numbers["reserved"])

    def limit(fraction: float, device: Any) -> None:
        numbers["fraction"] = fraction

    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", limit)
    return numbers


def test_a_pair_is_held_against_what_the_card_has_free(
    card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = loop_pair(tmp_path)

    def require() -> None:
        torch_memory.require_room(
            target,
            draft,
            torch.device("cuda"),
            dtype="bf16",
            quantize="nf4",
            draft_bits=None,
            head_bits=16,
            context=256,
            draft_window=None,
            kv_bits=8,
        )

    monkeypatch.delenv("DFLASH_FIT", raising=False)
    require()
    card["free"] = torch_memory.RESERVE + 1000
    with pytest.raises(DoesNotFit, match="free on a card"):
        require()
    monkeypatch.setenv("DFLASH_FIT", "off")
    require()


@pytest.mark.parametrize(("system", "limited"), [("win32", True), ("linux", False)])
def test_the_driver_of_windows_may_not_lend_main_memory(
    card: dict[str, Any], system: str, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    card["reserved"] = GIB
    torch_memory.fail_loudly(torch.device("cuda"))
    assert card.get("fraction") == (pytest.approx((7 - 0.75) / 8) if limited else None)
