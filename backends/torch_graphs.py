"""A target whose forwards of few rows are captured once and replayed.

A decode step is some hundred kernels of a few microseconds each; launched one by one they keep a
fast card waiting for the host. The graphs are captured by hand and need no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .torch_cache_device import DeviceCache
from .torch_lean import LeanTarget
from .torch_target import TargetShape

MOST_ROWS = 32
"""Longer forwards, prefills, run kernel by kernel."""


@dataclass(slots=True)
class _Captured:
    """One forward at fixed addresses; without a graph it is run again instead of replayed."""

    graph: torch.cuda.CUDAGraph | None
    ids: torch.Tensor
    states: torch.Tensor
    features: torch.Tensor | None


class GraphedTarget:
    """The contract of ``Target`` over a lean target, with a graph per rows and bucket.

    Args:
        inner: the target, over a ``DeviceCache``.
        taps: whether it is tapped.
        capture: whether forwards are captured; without, the same path runs kernel by kernel.
    """

    def __init__(self, inner: LeanTarget, cache: DeviceCache, *, taps: bool, capture: bool) -> None:
        self.shape: TargetShape = inner.shape
        self.device, self.dtype = inner.device, inner.dtype
        self.cache = cache
        self.failure: str | None = None
        """Why nothing is captured any more."""
        self._inner = inner
        self._taps = taps
        self._capture = capture
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._last: _Captured | None = None

    @property
    def graphs(self) -> int:
        """Forwards captured so far."""
        return sum(entry.graph is not None for entry in self._captured.values())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Final states ``[rows, hidden]``; valid until the next forward of as many rows."""
        rows = ids.shape[0]
        if rows > MOST_ROWS:
            self._last = None
            return self._inner.forward(ids)
        key = (rows, self.cache.bucket_for(rows))
        entry = self._captured.get(key)
        if entry is None:
            entry = self._captured[key] = self._prepare(ids)
        entry.ids.copy_(ids)
        if entry.graph is not None:
            entry.graph.replay()
        else:
            entry.states, entry.features = self._run(entry.ids)
        self._last = entry
        return entry.states

    def features(self) -> torch.Tensor:
        """Tapped states of the last forward, ``[rows, taps * hidden]``."""
        if self._last is None:
            return self._inner.features()
        assert self._last.features is not None
        return self._last.features

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The output head on final states, ``[rows, vocab]``."""
        return self._inner.logits(states)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The input embedding, ``[rows, hidden]``."""
        return self._inner.embed(ids)

    def bytes(self) -> int:
        """Size of the weights."""
        return self._inner.bytes()

    def close(self) -> None:
        """Let go of graphs and weights."""
        self._captured.clear()
        self._last = None
        self._inner.close()

    def _run(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        states = self._inner.forward(ids)
        return states, self._inner.features() if self._taps else None

    def _prepare(self, ids: torch.Tensor) -> _Captured:
        """Capture a forward; on any failure this and all later ones run kernel by kernel."""
        fixed = ids.clone()
        states, features = self._run(fixed)
        entry = _Captured(None, fixed, states, features)
        if not self._capture or self.failure is not None:
            return entry
        try:
            # The run above chose every kernel; capture must not be the first to see a shape.
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool()):
                states, features = self._run(fixed)
        except RuntimeError as error:
            self.failure = str(error).splitlines()[0]
            return entry
        return _Captured(graph, fixed, states, features)

    def _pool(self) -> Any:
        """The memory that the graphs captured before use; they never run at the same time."""
        graphs = [e.graph for e in self._captured.values() if e.graph is not None]
        return graphs[0].pool() if graphs else None
