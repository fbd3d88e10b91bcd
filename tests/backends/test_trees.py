"""Drafted trees: what is grown, how the target goes down them, and what stays behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.sampling import SamplingParams
from tests.support.draft_files import selector_pair, v2_pair
from tests.support.driving import PROMPT, done, one_round, plain, run
from tests.support.kits import Kit, Options, all_kits, model_kits
from tests.support.tiny import loop_pair
from tests.support.trees import around, proposal

ANCHOR = 99
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Library:
    """The same functions over one backend's arrays."""

    name: str
    array: Callable[[Any], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(f"dflash_local.backends.{self.name}_tree"), name)

    def lattice(self, ids: Any, scores: Any) -> Any:
        """Candidates and the scores of steps between them."""
        made = import_module(f"dflash_local.backends.{self.name}_probs").Lattice
        return made(self.array(ids), self.array(scores))


def libraries() -> list[Library]:
    """Those that are installed."""
    found = []
    if find_spec("torch"):
        import torch

        found.append(Library("torch", torch.tensor))
    if find_spec("mlx"):
        import mlx.core as mx

        found.append(Library("mlx", mx.array))
    return found


each_library = pytest.mark.parametrize("library", libraries(), ids=lambda library: library.name)
each_kit = pytest.mark.parametrize("kit", model_kits(), ids=lambda kit: kit.name)
every_kit = pytest.mark.parametrize("kit", all_kits(), ids=lambda kit: kit.name)


def paths(tree: Any) -> list[Ids]:
    """The drafted ids from the anchor to every row."""
    ids, parents = tree.ids.tolist(), tree.parents.tolist()
    found: list[Ids] = [()]
    for row in range(1, len(ids)):
        assert parents[row] < row, "a parent comes before its children"
        found.append((*found[parents[row]], ids[row]))
    return found


def likeliest(lattice: Any, count: int) -> list[Ids]:
    """The same by trying every path."""
    candidates, steps = np.asarray(lattice.candidates), np.asarray(lattice.scores)
    slots, width = candidates.shape
    scores: dict[Ids, float] = {}
    for depth in range(1, slots + 1):
        for columns in product(range(width), repeat=depth):
            before = (0, *columns)
            total = sum(float(steps[i, before[i], c]) for i, c in enumerate(columns))
            ids = tuple(int(candidates[i, c]) for i, c in enumerate(columns))
            scores[ids] = total - 1e-3 * depth
    return sorted(scores, key=lambda path: -scores[path])[:count]


@each_library
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.integers(0, 10**6)
)
def test_the_likeliest_continuations_are_drafted(
    library: Library, slots: int, width: int, count: int, chained: bool, seed: int
) -> None:
    draws = np.random.default_rng(seed)
    if chained:
        ids = np.stack([draws.permutation(20)[:width] for _ in range(slots)]).astype(np.int32)
        steps = 2 * draws.standard_normal((slots, width, width)).astype(np.float32)
        steps -= np.log(np.exp(steps).sum(-1, keepdims=True))
        lattice = library.lattice(ids, steps)
    else:
        scores = 2 * draws.standard_normal((slots, 20)).astype(np.float32)
        lattice = library.independent(library.array(scores), width)
    tree = library.grow(library.array([ANCHOR]), lattice, count)
    found = paths(tree)
    assert found[1:] == likeliest(lattice, count)
    assert tree.depths.tolist() == [len(path) for path in found]
    for row, seen in enumerate(tree.sees.tolist()):
        ancestors = {found[row][:depth] for depth in range(len(found[row]) + 1)}
        assert {found[other] for other, sees in enumerate(seen) if sees} == ancestors


@each_library
def test_certain_steps_are_a_path(library: Library) -> None:
    scores = np.full((7, 50), -1e4, dtype=np.float32)
    scores[np.arange(7), np.arange(7)] = 0.0
    lattice = library.independent(library.array(scores), 7)
    tree = library.grow(library.array([ANCHOR]), lattice, 7)
    assert paths(tree)[1:] == [tuple(range(depth)) for depth in range(1, 8)]


@each_library
@pytest.mark.parametrize("scale", [1e3, 1e5, np.inf])
def test_scores_of_any_size_make_a_tree(library: Library, scale: float) -> None:
    """Where fp32 cannot tell a certain child from its parent by what both are likely."""
    draws = np.random.default_rng(1)
    for _ in range(30):
        scores = draws.standard_normal((7, 40)).astype(np.float32)
        if np.isinf(scale):
            scores[scores < 1.5] = -np.inf
            scores[:, 0] = 0.0
        else:
            scores *= scale
        lattice = library.independent(library.array(scores), 15)
        tree = library.grow(library.array([ANCHOR]), lattice, 15)
        found = paths(tree)
        assert tree.depths.tolist() == [len(path) for path in found]


@each_library
def test_accepted_rows_come_in_the_order_of_their_depth(library: Library) -> None:
    """Also where a child lies before its parent."""
    sees = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    parts = ([5, 7, 6, 8], [0, 2, 0, 0], [0, 2, 1, 1])
    array = library.array
    tree = library.Tree(*map(array, parts), array(np.array(sees, dtype=bool)))
    figures, order = library.descend(tree, array([6, 9, 7, 3]))
    assert figures.tolist() == [2, 9]
    assert order.tolist()[:3] == [0, 2, 1]


@each_library
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 15), st.integers(0, 10**6))
def test_the_target_goes_down_its_own_ids(library: Library, count: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    scores = draws.standard_normal((5, 6)).astype(np.float32)
    lattice = library.independent(library.array(scores), 4)
    tree = library.grow(library.array([ANCHOR]), lattice, count)
    ids, parents = tree.ids.tolist(), tree.parents.tolist()
    chosen = draws.integers(0, 6, len(ids)).tolist()
    figures, order = library.descend(tree, library.array(chosen))
    children = {(parents[row], ids[row]): row for row in range(1, len(ids))}
    row, walked = 0, [0]
    while (row, chosen[row]) in children:
        row = children[row, chosen[row]]
        walked.append(row)
    assert figures.tolist() == [len(walked) - 1, chosen[row]]
    assert order.tolist()[: len(walked)] == walked
    assert sorted(order.tolist()) == list(range(len(ids)))


@every_kit
@pytest.mark.parametrize("make", [loop_pair, v2_pair, selector_pair], ids=["v1", "v2", "selector"])
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_trees_change_no_id(kit: Kit, make: Any, kv_bits: int | None, tmp_path: Path) -> None:
    target, draft = make(tmp_path)
    backend = kit.open(target, draft, Options(kv_bits=kv_bits))
    truth = plain(backend, PROMPT, 90)
    most = backend.info.rows(SamplingParams()) - 1
    assert most > backend.info.block_size
    for count in (1, 2, 3, most // 2, most):
        end = done(run(backend, count=count, max_tokens=90))
        assert list(end.tokens) == truth, count
        assert end.stats.accepted, "a draft that is never right proves nothing"
        assert len(end.stats.positions) <= backend.info.block_size - 1


@every_kit
@pytest.mark.parametrize("window", [None, 16])
def test_rows_on_any_branch_are_kept(kit: Kit, window: int | None, tmp_path: Path) -> None:
    """Trees whose right path lies on any rows leave what a fresh prefill leaves."""
    if window and kit.name == "mlx":
        pytest.skip("no trees over windows there")
    sliding = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 4}
    target, _ = loop_pair(tmp_path, sliding if window else None)
    backend = kit.open(target, None, Options())
    truth = plain(backend, PROMPT, 120)
    dice = random.Random(5)
    backend.rewind(0)
    backend.extend(PROMPT)
    ids, branched = [backend.sample()], 0
    while len(ids) < 100:
        verdict = backend.verify(proposal(kit.name, *around(truth[len(ids) - 1 :][:9], dice)))
        right = verdict.branches
        assert right is not None
        branched += right.ranks != tuple(range(1, len(right.ranks) + 1))
        keep = dice.randint(1, verdict.accepted + 1)
        backend.commit(keep)
        ids += verdict.tokens[:keep]
        assert ids == truth[: len(ids)]
    assert branched > 5
    reached = backend.rewind(len(PROMPT) + 80)
    backend.extend([*PROMPT, *truth][reached : len(PROMPT) + 90])
    assert backend.sample() == truth[90]


@each_kit
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(branching=False),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(repetition_penalty=1.2),
    ],
    ids=["as asked", "sampling", "penalties"],
)
def test_what_does_not_branch_drafts_paths(
    kit: Kit, sampling: SamplingParams, tmp_path: Path
) -> None:
    backend = kit.open(*loop_pair(tmp_path), Options())
    backend.configure(sampling)
    assert backend.info.rows(sampling) == backend.info.block_size
    backend.extend(PROMPT)
    pending = backend.sample()
    for _ in range(5):
        verdict = one_round(backend, pending, 3)
        assert verdict.branches is None
        pending = verdict.next
