"""A long chat over 60 turns: invariants every round, every tenth reply run cold, memory flat.

The script runs through 10,000 tokens; models through fewer, or ``DFLASH_SOAK_TOKENS=10000``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_local.backends.scripted import ByteTokenizer, ScriptedBackend, cycling, mixed_target
from dflash_local.costs import Costs
from dflash_local.engine import Opened
from dflash_local.tokenizer import HubTokenizer
from tests.support.chat_pair import chat_pair
from tests.support.kits import Options, TorchKit
from tests.support.soak import Tally, soak

TURNS = 60
COSTS = Costs((1.0, 1.3, 1.4, 1.5))


def tokens_or(default: int) -> int:
    return int(os.environ.get("DFLASH_SOAK_TOKENS", default))


def held_up(tally: Tally, tokens: int, growth: int) -> None:
    """Everything happened, and memory stayed where it was after the first third."""
    assert tally.tokens >= tokens
    assert tally.turns >= TURNS
    assert tally.compared >= TURNS // 10 - 1
    assert set(tally.actions) == {"send", "retry", "edit", "go on", "cut"}
    assert {"length", "cancelled", "left"} <= set(tally.ends)
    assert tally.left_out > 0
    assert tally.reused > tokens
    third = len(tally.resident) // 3
    if tally.resident:
        assert max(tally.resident[third:]) - max(tally.resident[:third]) < growth


def test_a_scripted_pair() -> None:
    def opener() -> Opened:
        backend = ScriptedBackend(
            mixed_target(200), cycling((1, 3, 0, 2)), block_size=4, context=2048, stop_ids=()
        )
        return Opened(backend, ByteTokenizer(), COSTS)

    tally = soak(opener, tokens=10_000, turns=TURNS, sampled=False, seed=1)
    held_up(tally, 10_000, 8 * 2**20)


def test_a_tiny_pair(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    target, draft = chat_pair(tmp_path)
    tokens = tokens_or(1_200)
    context = max(512, min(2048, tokens // 4))  # small enough to run full

    def opener() -> Opened:
        backend = TorchKit().open(target, draft, Options(context=context))
        return Opened(backend, HubTokenizer(target), COSTS)

    tally = soak(opener, tokens=tokens, turns=TURNS, sampled=True, seed=2)
    held_up(tally, tokens, 16 * 2**20)


@pytest.mark.slow
def test_the_demo_pair() -> None:
    """The same without checks of memory; ``python -m tests.support.soak`` shows its progress."""
    from dflash_local import demo
    from dflash_local.select import LoadOptions, PairOpener

    demo.ensure(lambda stage, done, total: None)
    pair = PairOpener("demo", options=LoadOptions("torch", "fp32", context=2048, threads=1))
    tokens = tokens_or(100)
    turns = min(TURNS, max(10, tokens // 50))
    tally = soak(lambda: pair(lambda step: None), tokens=tokens, turns=turns, sampled=True, seed=3)
    assert tally.tokens >= tokens
    assert tally.compared >= 1
