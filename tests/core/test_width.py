"""Width control: the best count, parking, probing, coming back."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from dflash_local.backend import MemoryFigures
from dflash_local.backends.scripted import ScriptedBackend, cycling, mixed_target
from dflash_local.bench_topics import TOPICS
from dflash_local.branches import Branches
from dflash_local.costs import (
    Costs,
    costs_of,
    interpolated,
    measure,
    measured_counts,
    undisturbed,
)
from dflash_local.events import Round
from dflash_local.width import AutoWidth
from tests.support.width_play import (
    TABLES,
    TREE_TABLES,
    Text,
    best_fixed,
    drifting,
    geometric,
    mismeasured,
    patchy,
    play,
    recorded,
    recorded_trees,
    within,
)

CPU = TABLES["avx512"]
TOKENS = 3000
TEXTS = {
    **{name: recorded(name, TOKENS) for name in TOPICS},
    "useless": geometric(0.0, TOKENS),
    "poor": geometric(0.3, TOKENS),
    "good": geometric(0.8, TOKENS),
    "patchy": patchy(0.85, 0.2, 0.995, TOKENS),
    "better and better": drifting([0.1 + 0.8 * at / TOKENS for at in range(TOKENS)]),
    "worse and worse": drifting([0.9 - 0.8 * at / TOKENS for at in range(TOKENS)]),
}


def shares(costs: Costs, text: Text) -> list[float]:
    """Auto over the best fixed width, from a table that a busy machine measured."""
    found = []
    for seed in (1, 2):
        auto = AutoWidth(mismeasured(costs, 0.05, seed))
        played = play(auto, text, costs, noise=0.1, deeper=0.5, seed=seed)
        fixed = best_fixed(text, costs, noise=0.1, deeper=0.5, seed=seed)
        found.append(played.speed / fixed)
    return found


@pytest.mark.parametrize("table", TABLES)
def test_auto_is_as_fast_as_the_best_fixed_width(table: str) -> None:
    found = {name: mean(shares(TABLES[table], text)) for name, text in TEXTS.items()}
    shown = ", ".join(f"{name} {share:.3f}" for name, share in found.items())
    assert min(found.values()) > 0.955, shown
    assert mean(found.values()) > 0.985, shown


@pytest.mark.parametrize("table", TREE_TABLES)
def test_auto_is_as_fast_with_trees(table: str) -> None:
    texts = {name: recorded_trees(name, TOKENS) for name in TOPICS}
    found = {name: mean(shares(TREE_TABLES[table], text)) for name, text in texts.items()}
    shown = ", ".join(f"{name} {share:.3f}" for name, share in found.items())
    # The best of sixteen fixed widths on a text that comes again and again is also a lucky one.
    assert min(found.values()) > 0.94, shown
    assert mean(found.values()) > 0.97, shown


def test_a_tree_is_learnt_by_rank() -> None:
    """Rounds of all widths tell what each of them yields."""
    width = AutoWidth(Costs((10.0,) * 8))
    dice = random.Random(3)
    right = [(1, 2), (1, 2, 4, 6), (1, 3), (2,), (2, 5, 7), (3,), (), (1, 2, 4)]
    for _ in range(4000):
        count = dice.randint(1, 7)
        path = within(dice.choice(right), count)
        branches = Branches(min(count, 4), path)
        tokens = (0,) * (len(path) + 1)
        width.observe(Round(1, count, len(path), tokens, 10.0, None, None, 0, branches=branches))
    for count, expected in enumerate(width.expected()):
        yields = [1 + len(within(path, count)) for path in right]
        assert expected == pytest.approx(mean(yields), rel=0.12), count


@pytest.mark.parametrize("table", TABLES)
def test_a_useless_draft_is_parked_and_costs_little(table: str) -> None:
    costs = TABLES[table]
    played = play(AutoWidth(costs), geometric(0.0, 512), costs, noise=0.0)
    assert True in played.parked[:40]
    assert played.speed > 0.97 / costs.ms[0]


def test_a_parked_draft_comes_back_when_it_helps_again() -> None:
    width = AutoWidth(CPU)
    assert play(width, geometric(0.0, 200), CPU).parked[-1]
    counts = play(width, geometric(0.9, 1500), CPU).counts
    assert sum(count > 0 for count in counts[-50:]) > 45


def test_the_less_drafting_pays_the_longer_it_rests() -> None:
    text = geometric(0.0, 2000)
    probes = {}
    for factor in (1.2, 2.0, 4.0):
        costs = Costs((10.0, *(10.0 * factor for _ in range(7))))
        probes[factor] = sum(count > 0 for count in play(AutoWidth(costs), text, costs).counts)
    assert probes[1.2] > 1.5 * probes[2.0] > 2.0 * probes[4.0] > 0


def test_a_deeper_context_that_slows_every_width_does_not_park() -> None:
    width, slow = AutoWidth(CPU), Costs(tuple(2.0 * ms for ms in CPU.ms))
    play(width, geometric(0.7, 400), CPU)
    counts = play(width, geometric(0.7, 600, seed=2), slow).counts
    assert sum(count == 0 for count in counts) < len(counts) / 10


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
    assert measured_counts(8) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert measured_counts(1) == (0,)


def test_no_round_is_dearer_than_a_wider_one() -> None:
    busy = {0: 1092.0, 1: 655.0, 2: 638.0, 3: 621.0, 4: 1191.0, 7: 3161.0}
    assert undisturbed(busy) == [
        *((count, 621.0) for count in range(4)),
        (4, 1191.0),
        (7, 3161.0),
    ]


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


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{}",
        '{"ms": [1]}',
        '{"ms": "x"}',
        '{"ms": [0,0,0,-1]}',
        "[" * 100_000,
        '{"ms": [' + "9" * 400 + ",1,1,1]}",
    ],
)
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


def test_a_draft_that_was_trained_anew_in_its_place_has_costs_of_its_own(tmp_path: Path) -> None:
    class Larger(ScriptedBackend):
        def memory(self) -> MemoryFigures:
            held: MemoryFigures = super().memory()
            return replace(held, draft=1)

    costs_of(scripted(), tmp_path)
    costs_of(Larger(mixed_target(128), cycling([1]), block_size=4, vocab_size=128), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
