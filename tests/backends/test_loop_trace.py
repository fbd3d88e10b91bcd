"""The loop, round by round, against traces of the published reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_local.backend import Backend, BackendInfo, Coverage, MemoryFigures, Proposal, Verdict
from dflash_local.lookup import NOTHING, Found
from dflash_local.sampling import SamplingParams
from tests.support.driving import done, run
from tests.support.kits import DATA, Kit, Options
from tests.support.tiny import loop_pair

CASES: dict[str, Any] = json.loads((DATA / "loop_trace.json").read_text())["cases"]


class Recorder:
    """Passes every call on and notes what each round did."""

    def __init__(self, inner: Backend, block_size: int) -> None:
        self._inner = inner
        self._block_size = block_size
        self.rounds: list[dict[str, Any]] = []

    @property
    def info(self) -> BackendInfo:
        info = self._inner.info
        fields = {name: getattr(info, name) for name in info.__slots__}
        return BackendInfo(**{**fields, "block_size": self._block_size})

    @property
    def position(self) -> int:
        return self._inner.position

    @property
    def coverage(self) -> Coverage:
        return self._inner.coverage

    def configure(self, sampling: SamplingParams) -> None:
        self._inner.configure(sampling)

    def rewind(self, position: int) -> int:
        return self._inner.rewind(position)

    def extend(self, tokens: Sequence[int]) -> None:
        self._inner.extend(tokens)

    def sample(self) -> int:
        return self._inner.sample()

    def margin(self) -> float:
        return self._inner.margin()

    def propose(self, pending: int, count: int, found: Found = NOTHING) -> Proposal:
        self.rounds.append({"start": self.position, "pending": pending, "count": count})
        proposal = self._inner.propose(pending, count, found)
        self.rounds[-1]["draft_len"] = self.coverage.draft
        return proposal

    def verify(self, proposal: Proposal) -> Verdict:
        verdict = self._inner.verify(proposal)
        self.rounds[-1]["verdict"] = verdict
        return verdict

    def commit(self, keep: int) -> None:
        self._inner.commit(keep)
        self.rounds[-1]["keep"] = keep
        self.rounds[-1]["coverage"] = self.coverage

    def memory(self) -> MemoryFigures:
        return self._inner.memory()

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("name", CASES)
def test_every_round_is_the_references(kit: Kit, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    target, draft = loop_pair(
        tmp_path, case.get("target_config_override"), case.get("draft_config_override")
    )
    backend = Recorder(kit.open(target, draft, Options(context=64)), case["block_size"])
    backend.extend(case["prompt"])
    covered = backend.coverage
    assert covered.target == case["prefill"]["target_cache_len"]
    assert covered.draft + covered.pending == case["prefill"]["pending_context_rows"]
    assert backend.sample() == case["prefill"]["first_token"]

    end = done(
        run(
            backend,
            case["prompt"],
            count=case["block_size"] - 1,
            max_tokens=case["max_new_tokens"],
            stop_ids=case["stop_token_ids"] or (),
            branching=False,
        )
    )
    assert list(end.tokens) == case["output_ids"]
    assert (end.reason == "stop") == case["stopped_by_stop_token"]
    assert end.stats.tokens / max(1, end.stats.rounds) == pytest.approx(
        case["mean_emitted_per_round"], abs=1e-3
    )
    assert len(backend.rounds) == len(case["rounds"])
    for ours, theirs in zip(backend.rounds, case["rounds"], strict=True):
        verdict = ours["verdict"]
        assert ours["start"] == theirs["start"]
        assert [ours["pending"], *verdict.drafted] == theirs["block_verified"]
        assert ours["count"] + 1 == len(theirs["block_input"])
        if ours["count"]:
            assert ours["draft_len"] == theirs["draft_cache_len_after_draft"]
        assert verdict.accepted == theirs["accepted"]
        assert list(verdict.tokens) == theirs["target_argmax"][: verdict.accepted + 1]
        assert list(verdict.tokens)[: ours["keep"]] == theirs["emitted"]
        assert ours["coverage"].target == theirs["target_cache_len_after_crop"]
        assert ours["coverage"].draft + ours["coverage"].pending == theirs["start_after"]
