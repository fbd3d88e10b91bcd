"""Width control: the best count, parking, probing, coming back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dflash_local.backends.scripted import ScriptedBackend, cycling, mixed_target
from dflash_local.costs import Costs, costs_of, interpolated, measure, measured_counts
from dflash_local.events import Round
from dflash_local.width import AutoWidth

# A draft pass and a wider verify both cost: the shape measured on the demo pair.
CPU = Costs((25.0, 31.5, 31.8, 32.0, 33.0, 34.0, 34.6, 35.2))
FLAT = Costs((10.0, 11.0, 11.0, 11.0, 11.0, 11.0, 11.0, 11.0))


def play(
    width: AutoWidth,
    chances: list[float],
    rounds: int,
    costs: Costs = CPU,
    slow: float = 1.0,
    seed: int = 1,
) -> tuple[int, float, list[int]]:
    """Play rounds with given conditional acceptance; return tokens, milliseconds and counts."""
    dice = random.Random(seed)
    tokens, spent, counts = 0, 0.0, []
    for _ in range(rounds):
        count = width.next(0)
        accepted = 0
        while accepted < count and dice.random() < chances[accepted]:
            accepted += 1
        ms = costs.ms[count] * slow * dice.uniform(0.95, 1.05)
        width.observe(Round(1, count, accepted, (0,) * (accepted + 1), ms, None, None, 0))
        tokens, spent = tokens + accepted + 1, spent + ms
        counts.append(count)
    return tokens, spent, counts


def speed(costs: Costs, chances: list[float], count: int) -> float:
    reach = total = 1.0
    for chance in chances[:count]:
        reach *= chance
        total += reach
    return total / costs.ms[count]


def test_a_useless_draft_is_parked_and_costs_little() -> None:
    width = AutoWidth(CPU)
    tokens, spent, counts = play(width, [0.0] * 7, 512)
    assert 0 in counts[:40]
    first = counts.index(0)
    assert first < 40
    assert width.parked or counts[-1] == 0
    assert tokens / spent > 0.97 / CPU.ms[0]


def test_a_parked_draft_comes_back_when_it_helps_again() -> None:
    width = AutoWidth(CPU)
    play(width, [0.0] * 7, 200)
    _, _, counts = play(width, [0.9] * 7, 400)
    assert sum(count > 0 for count in counts[-50:]) > 45


@pytest.mark.parametrize("costs", [CPU, FLAT])
@pytest.mark.parametrize("chance", [0.3, 0.5, 0.6, 0.8, 0.95])
def test_it_is_as_good_as_the_best_fixed_width(costs: Costs, chance: float) -> None:
    chances = [chance] * 7
    width = AutoWidth(costs)
    play(width, chances, 100, costs)
    tokens, spent, _ = play(width, chances, 2000, costs, seed=2)
    best = max(speed(costs, chances, count) for count in range(8))
    assert tokens / spent > 0.95 * best


def test_a_deeper_context_that_slows_every_width_does_not_park() -> None:
    width = AutoWidth(CPU)
    play(width, [0.6] * 7, 200)
    _, _, counts = play(width, [0.6] * 7, 300, slow=2.0)
    assert sum(count == 0 for count in counts) < 30


def test_far_positions_are_learnt_only_when_reached() -> None:
    width = AutoWidth(CPU)
    before = width.expected()
    for _ in range(30):
        width.observe(Round(1, 1, 1, (0, 0), 30.0, None, None, 0))
    after = width.expected()
    assert after[1] > 1.9
    assert after[7] / after[1] > before[7] / before[1]


def test_without_a_draft_there_is_nothing_to_choose() -> None:
    width = AutoWidth(Costs((5.0,)))
    assert width.next(0) == 0
    assert not width.parked


def test_lines_between_measured_points() -> None:
    assert interpolated([(0, 1.0), (2, 3.0)], 3) == (1.0, 2.0, 3.0)
    assert interpolated([(0, 4.0)], 2) == (4.0, 4.0)
    assert measured_counts(8) == (0, 1, 2, 3, 4, 6, 7)
    assert measured_counts(1) == (0,)


def scripted(block_size: int = 4) -> ScriptedBackend:
    return ScriptedBackend(
        mixed_target(128), cycling([1]), block_size=block_size, vocab_size=128, round_ms=1.0
    )


def test_measuring_leaves_the_caches_empty() -> None:
    backend = scripted()
    costs = measure(backend)
    assert len(costs.ms) == 4
    assert min(costs.ms) >= 1.0
    assert backend.position == 0


@pytest.mark.parametrize("context", [1, 2, 3, 4, 5, 9, 40])
def test_a_context_smaller_than_the_block_is_measured_too(context: int) -> None:
    backend = ScriptedBackend(
        mixed_target(128), cycling([1]), block_size=8, vocab_size=128, context=context
    )
    assert len(measure(backend).ms) == 8


def test_costs_are_measured_once(tmp_path: Path) -> None:
    first = costs_of(scripted(), tmp_path)
    assert costs_of(scripted(), tmp_path) == first
    assert len(list(tmp_path.iterdir())) == 1
    costs_of(scripted(5), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["", "{}", '{"ms": [1]}', '{"ms": "x"}', '{"ms": [0,0,0,-1]}'])
def test_a_damaged_memory_is_measured_again(tmp_path: Path, damage: str) -> None:
    costs_of(scripted(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert len(costs_of(scripted(), tmp_path).ms) == 4
    assert '"ms": [' in file.read_text()


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert len(costs_of(scripted(), blocked / "costs").ms) == 4
