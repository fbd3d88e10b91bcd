"""A stand-in for CUDA graphs on the CPU: operators are recorded once and replayed in place.

As on a card, a replay runs no Python of the captured function, takes every number as it was at
capture, and reads and writes the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_local.backends.torch_graphs import Graphs


class RecordedGraph:
    """What ``torch.cuda.CUDAGraph`` offers."""

    replays = 0

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        """Run the operators again; fresh results go to where they were at capture."""
        RecordedGraph.replays += 1
        for func, args, kwargs, kept in self.steps:
            for old, new in zip(tree_leaves(kept), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> None:
        """No memory of its own."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._graph.steps.append((func, args, kwargs or {}, out))
        return out


@contextmanager
def _capture(graph: RecordedGraph, pool: object = None) -> Iterator[None]:
    with _Recorder(graph):
        yield


def capture_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let every ``Graphs`` capture, by recording."""
    begin = Graphs.__init__

    def capturing(self: Graphs, device: torch.device, *, capture: bool) -> None:
        begin(self, device, capture=True)

    patch.setattr(Graphs, "__init__", capturing)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    patch.setattr(torch.cuda, "graph", _capture)
