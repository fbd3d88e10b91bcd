"""Functions of tensors that are captured once per shape and replayed.

A round is some hundred kernels of a few microseconds each; launched one by one they keep a fast
card waiting for the host. The graphs are captured by hand and need no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Key = tuple[str, int, int]
"""What runs, its rows, and the bucket of K/V rows that it reads: all that its shapes depend on."""

Function = Callable[..., Sequence[torch.Tensor]]


@dataclass(slots=True)
class _Entry:
    """One function at fixed addresses; without a graph it is run again instead of replayed."""

    graph: torch.cuda.CUDAGraph | None
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


class Graphs:
    """Runs functions at fixed addresses, by graph where they can be captured.

    What comes back lies at the same addresses every time and counts until the same key runs
    again, captured or not: so what is tested without a card is what happens on one. A function
    may write elsewhere only where writing twice is as good as once.

    Args:
        device: where the functions run.
        capture: whether they are captured; without, the same path runs kernel by kernel.
    """

    def __init__(self, device: torch.device, *, capture: bool) -> None:
        self.failure: str | None = None
        """Why nothing is captured any more."""
        self._device = device
        self._capture = capture
        self._entries: dict[Key, _Entry] = {}

    @property
    def captured(self) -> int:
        """Graphs so far."""
        return sum(entry.graph is not None for entry in self._entries.values())

    @property
    def words(self) -> str:
        """How things run, for reports."""
        if self.failure is not None:
            return f"no CUDA graphs, kernel by kernel: {self.failure}"
        return "CUDA graphs" if self._capture else "fixed addresses, kernel by kernel"

    def run(
        self, key: Key | None, function: Function, *inputs: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """What ``function(*inputs)`` gives; without a key it is just called.

        Every call with the same key must name the same function and inputs of the same shapes.
        """
        if key is None:
            return function(*inputs)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._prepare(function, inputs)
            return entry.outputs
        for fixed, given in zip(entry.inputs, inputs, strict=True):
            fixed.copy_(given)
        if entry.graph is not None:
            entry.graph.replay()
        else:
            for fixed, fresh in zip(entry.outputs, function(*entry.inputs), strict=True):
                fixed.copy_(fresh)
        return entry.outputs

    def close(self) -> None:
        """Let go of everything captured."""
        self._entries.clear()

    def _prepare(self, function: Function, inputs: Sequence[torch.Tensor]) -> _Entry:
        """Run a function once and capture it; on any failure this and all later ones run kernel
        by kernel."""
        fixed = [tensor.clone() for tensor in inputs]
        entry = _Entry(None, fixed, function(*fixed))
        if not self._capture or self.failure is not None:
            return entry
        try:
            # The run above chose every kernel; capture must not be the first to see a shape.
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool()):
                outputs = function(*fixed)
            graph.replay()
        except RuntimeError as error:
            self.failure = str(error).splitlines()[0]
            return entry
        return _Entry(graph, fixed, outputs)

    def _pool(self) -> Any:
        """The memory that the graphs captured before use; they never run at the same time."""
        graphs = [e.graph for e in self._entries.values() if e.graph is not None]
        return graphs[0].pool() if graphs else None
