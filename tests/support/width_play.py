"""Plays a width policy on what a draft would have had accepted at every token of a text.

A text says for every token which of the ids drafted there are right: of a path the first so many,
of a tree the ranks on the right path. A round of k ids at a token gets those before the first
beyond k, so every policy plays the same text.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, takewhile

from dflash_local.branches import Branches
from dflash_local.costs import Costs
from dflash_local.events import Round
from dflash_local.width import FixedWidth, Width
from tests.support.kits import DATA

Text = Sequence[int] | Sequence[tuple[int, ...]]

DEPTH = 7
"""Slots of the draft that the trees were recorded with."""

STALLS = 0.01
"""Share of rounds that take three times as long, as on a machine that has other work."""

# Milliseconds of a round that drafts 0, 1, .. ids.
TABLES: dict[str, Costs] = {
    # Measured: the demo pair in bf16 on an AVX512 CPU, and in fp32 on a slow one.
    "avx512": Costs((16.0, 21.5, 23.3, 25.2, 26.5, 28.5, 30.3, 32.0)),
    "slow cpu": Costs((67.5, 110.0, 125.0, 138.0, 147.0, 158.0, 170.0, 180.0)),
    # Drafting is nearly free and rows are too: a GPU that reads weights.
    "flat": Costs((10.0, 11.0, 11.0, 11.1, 11.1, 11.2, 11.2, 11.3)),
    "gpu": Costs(tuple([20.0] + [23.0 + 0.12 * count for count in range(1, 16)])),
    # Every row costs, as where the arithmetic bounds.
    "steep": Costs(tuple(10.0 + 4.0 * count for count in range(8))),
    # A kernel that changes at five rows.
    "step": Costs((10.0, 12.0, 12.2, 12.4, 19.0, 19.2, 19.4, 19.6)),
}

# The same for trees, which may have more rows than the block.
TREE_TABLES: dict[str, Costs] = {
    "avx512": Costs((16.0, *(21.5 + 1.7 * count for count in range(15)))),
    "slow cpu": Costs((67.5, *(110.0 + 12.0 * count for count in range(15)))),
    "gpu": TABLES["gpu"],
}


@dataclass(frozen=True, slots=True)
class Played:
    """A text, played."""

    tokens: int
    ms: float
    counts: tuple[int, ...]
    parked: tuple[bool, ...]

    @property
    def speed(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms


def geometric(chance: float, length: int, seed: int = 1, most: int = 15) -> list[int]:
    """Every slot is right with the same chance, given the ones before."""
    return drifting([chance] * length, seed, most)


def drifting(chances: Sequence[float], seed: int = 1, most: int = 15) -> list[int]:
    """A chance per token."""
    dice = random.Random(seed)
    digits = []
    for chance in chances:
        right = 0
        while right < most and dice.random() < chance:
            right += 1
        digits.append(right)
    return digits


def patchy(easy: float, hard: float, stay: float, length: int, seed: int = 1) -> list[int]:
    """Easy and hard stretches of text, which last ``1 / (1 - stay)`` tokens on average."""
    dice, chances, chance = random.Random(seed), [], easy
    for _ in range(length):
        if dice.random() > stay:
            chance = hard if chance == easy else easy
        chances.append(chance)
    return drifting(chances, seed + 1)


def within(ranks: Sequence[int], count: int) -> tuple[int, ...]:
    """What is accepted where only the ``count`` likeliest ids are drafted."""
    return tuple(takewhile(lambda rank: rank <= count, ranks))


def play(
    width: Width,
    text: Text,
    costs: Costs,
    *,
    noise: float = 0.05,
    deeper: float = 0.0,
    seed: int = 1,
) -> Played:
    """Play a text to its end.

    Args:
        noise: standard deviation of a round's relative time; 0 also leaves out the stalls.
        deeper: how much slower a round is at the end of the text than at its beginning.
    """
    dice = random.Random(seed)
    at, spent = 0, 0.0
    counts, parked = [], []
    while at < len(text):
        count = width.next(at)
        right = text[at]
        ranks = tuple(range(1, right + 1)) if isinstance(right, int) else right
        ranks = within(ranks, count)
        accepted, branches = len(ranks), None
        if not isinstance(right, int):
            branches = Branches(min(count, DEPTH), ranks)
        ms = costs.ms[count] * math.exp(dice.gauss(0.0, noise)) * (1.0 + deeper * at / len(text))
        if noise and dice.random() < STALLS:
            ms *= 3.0
        tokens = (0,) * (accepted + 1)
        width.observe(Round(1, count, accepted, tokens, ms, None, None, 0, branches=branches))
        spent += ms
        at += accepted + 1
        counts.append(count)
        parked.append(width.parked)
    return Played(at, spent, tuple(counts), tuple(parked))


def best_fixed(text: Text, costs: Costs, *, noise: float, deeper: float, seed: int) -> float:
    """The speed of the fixed count that was best, plain decoding included."""
    return max(
        play(FixedWidth(count), text, costs, noise=noise, deeper=deeper, seed=seed).speed
        for count in range(len(costs.ms))
    )


def recorded(topic: str, length: int) -> list[int]:
    """A topic's answers of the demo pair, over and over."""
    answers = json.loads((DATA / "acceptance.json").read_text())[topic]
    return [int(digit) for digit in islice(cycle("".join(answers)), length)]


def recorded_trees(topic: str, length: int) -> list[tuple[int, ...]]:
    """The same of drafted trees."""
    answers = json.loads((DATA / "acceptance_trees.json").read_text())[topic]
    words = islice(cycle(" ".join(answers).split()), length)
    return [() if word == "-" else tuple(int(rank, 16) for rank in word) for word in words]


def mismeasured(costs: Costs, error: float, seed: int = 1) -> Costs:
    """A table as a busy machine measures it: each count off by up to ``error``."""
    dice = random.Random(seed)
    return Costs(tuple(ms * (1.0 + dice.uniform(-error, error)) for ms in costs.ms))
