"""Fixtures of the backend tests: a kit per backend, a backend per contract test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dflash_local
from dflash_local import Engine, demo
from dflash_local.backend import Backend
from dflash_local.backends.scripted import ScriptedBackend, cycling, mixed_target
from tests.support.kits import Kit, Options, model_kits
from tests.support.tiny import loop_pair

Opener = Callable[..., Backend]


@pytest.fixture(params=model_kits(), ids=lambda kit: kit.name)
def kit(request: pytest.FixtureRequest) -> Kit:
    """Each backend that runs models."""
    chosen: Kit = request.param
    return chosen


@pytest.fixture(params=["scripted", *model_kits()], ids=lambda k: k if k == "scripted" else k.name)
def open_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens fresh backends over the same pair: 128 ids, block 4, mixed acceptance."""
    opened: list[Backend] = []

    def opener(context: int = 256, draft: bool = True) -> Backend:
        backend: Backend
        if request.param == "scripted":
            backend = ScriptedBackend(
                mixed_target(128),
                cycling((1, 3, 0, 2)),
                block_size=4 if draft else 1,
                vocab_size=128,
                context=context,
                stop_ids=(),
            )
        else:
            long = {"max_position_embeddings": 1024}
            target, drafter = loop_pair(tmp_path, long, long)
            options = Options(context=context)
            backend = request.param.open(target, drafter if draft else None, options)
        opened.append(backend)
        return backend

    yield opener
    for backend in opened:
        backend.close()


@pytest.fixture(scope="session")
def demo_engine() -> Iterator[Engine]:
    """The demo pair in fp32, where rounding explains no difference, loaded once a process."""
    demo.ensure(lambda stage, done, total: None)
    with dflash_local.load("demo", backend="torch", dtype="fp32", threads=1) as loaded:
        yield loaded


@pytest.fixture
def backend(open_backend: Opener) -> Backend:
    """One backend with a context of 256."""
    return open_backend()
