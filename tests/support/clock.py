"""A clock that only rounds move: throughput as a count, whatever the machine is doing."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local import loop
from dflash_local.backend import Backend, Proposal, Verdict
from dflash_local.costs import Costs


class Clocked:
    """A backend whose rounds take exactly what a table says."""

    def __init__(self, backend: Backend, costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
        self._backend, self._costs = backend, costs
        self.ms = 0.0
        self.counts: list[int] = []
        monkeypatch.setattr(loop, "perf_counter", lambda: self.ms / 1000.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def verify(self, proposal: Proposal) -> Verdict:
        verdict = self._backend.verify(proposal)
        self.ms += self._costs.ms[len(verdict.drafted)]
        self.counts.append(len(verdict.drafted))
        return verdict
