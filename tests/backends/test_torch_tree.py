"""Drafted trees: what is grown, how the target goes down them, and what stays behind."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dflash_local.backends.torch_backend import TorchBackend  # noqa: E402
from dflash_local.backends.torch_load import open_pair  # noqa: E402
from dflash_local.backends.torch_probs import Lattice  # noqa: E402
from dflash_local.backends.torch_tree import (  # noqa: E402
    Tree,
    dependent,
    descend,
    grow,
    independent,
)
from dflash_local.sampling import SamplingParams  # noqa: E402
from tests.support.draft_files import v2_pair  # noqa: E402
from tests.support.driving import PROMPT, done, one_round, plain, run  # noqa: E402
from tests.support.kits import Options  # noqa: E402
from tests.support.tiny import loop_pair  # noqa: E402

ANCHOR = 99


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """The drafted ids from the anchor to every row."""
    ids, parents = tree.ids.tolist(), tree.parents.tolist()
    found: list[tuple[int, ...]] = [()]
    for row in range(1, len(ids)):
        assert parents[row] < row, "a parent comes before its children"
        found.append((*found[parents[row]], ids[row]))
    return found


def likeliest(lattice: Lattice, count: int) -> list[tuple[int, ...]]:
    """The same by trying every path."""
    slots, width = lattice.candidates.shape
    scores = {}
    for depth in range(1, slots + 1):
        for columns in product(range(width), repeat=depth):
            before = (0, *columns)
            total = sum(float(lattice.scores[i, before[i], c]) for i, c in enumerate(columns))
            ids = tuple(int(lattice.candidates[i, c]) for i, c in enumerate(columns))
            scores[ids] = total - 1e-4 * depth
    return sorted(scores, key=lambda path: -scores[path])[:count]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.integers(0, 10**6)
)
def test_the_likeliest_continuations_are_drafted(
    slots: int, width: int, count: int, chained: bool, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    if chained:
        ids = torch.stack([torch.randperm(20, generator=draws)[:width] for _ in range(slots)])
        lattice = dependent(Lattice(ids, 2 * torch.randn(slots, width, width, generator=draws)))
    else:
        lattice = independent(2 * torch.randn(slots, 20, generator=draws), width)
    tree = grow(torch.tensor([ANCHOR]), lattice, count)
    found = paths(tree)
    assert found[1:] == likeliest(lattice, count)
    assert tree.depths.tolist() == [len(path) for path in found]
    for row, path in enumerate(found):
        seen = {found[other] for other in tree.sees[row].nonzero()[:, 0].tolist()}
        assert seen == {path[:depth] for depth in range(len(path) + 1)}


def test_certain_steps_are_a_path() -> None:
    scores = torch.full((7, 50), -1e4)
    scores[torch.arange(7), torch.arange(7)] = 0.0
    tree = grow(torch.tensor([ANCHOR]), independent(scores, 7), 7)
    assert paths(tree)[1:] == [tuple(range(depth)) for depth in range(1, 8)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 15), st.integers(0, 10**6))
def test_the_target_goes_down_its_own_ids(count: int, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    lattice = independent(torch.randn(5, 6, generator=draws), 4)
    tree = grow(torch.tensor([ANCHOR]), lattice, count)
    chosen = torch.randint(0, 6, (len(tree.ids),), generator=draws)
    figures, order = descend(tree, chosen)
    row, walked = 0, [0]
    children = {
        (int(parent), int(token)): index
        for index, (parent, token) in enumerate(zip(tree.parents, tree.ids, strict=True))
        if index
    }
    while (row, int(chosen[row])) in children:
        row = children[row, int(chosen[row])]
        walked.append(row)
    assert figures.tolist() == [len(walked) - 1, int(chosen[row]), int(tree.depths.max())]
    assert order[: len(walked)].tolist() == walked
    assert sorted(order.tolist()) == list(range(len(tree.ids)))


def pair(folder: Path, make: Any, *, fixed: bool = False, **options: Any) -> TorchBackend:
    target, draft = make(folder)
    backend: TorchBackend = open_pair(
        target, draft, Options(**options), lambda step: None, graphs=fixed
    )
    return backend


@pytest.mark.parametrize("make", [loop_pair, v2_pair], ids=["v1", "v2"])
@pytest.mark.parametrize("options", [{}, {"fixed": True}, {"kv_bits": 8}], ids=str)
def test_trees_change_no_id(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    backend = pair(tmp_path, make, **options)
    truth = plain(backend, PROMPT, 90)
    most = backend.info.rows(SamplingParams()) - 1
    assert most > backend.info.block_size
    for count in range(1, most + 1):
        end = done(run(backend, count=count, max_tokens=90))
        assert list(end.tokens) == truth, count
        assert end.stats.accepted, "a draft that is never right proves nothing"
        assert len(end.stats.positions) <= backend.info.block_size - 1


@pytest.mark.parametrize("fixed", [False, True], ids=["views", "fixed"])
@pytest.mark.parametrize("window", [None, 16])
def test_rows_on_any_branch_are_kept(fixed: bool, window: int | None, tmp_path: Path) -> None:
    """Trees whose right path lies on any rows leave what a fresh prefill leaves."""
    settings = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 4} if window else {}
    target, _ = loop_pair(tmp_path, settings or None)
    backend: TorchBackend = open_pair(target, None, Options(), lambda step: None, graphs=fixed)
    truth = plain(backend, PROMPT, 120)
    dice = random.Random(5)
    backend.rewind(0)
    backend.extend(PROMPT)
    ids, branched = [backend.sample()], 0
    while len(ids) < 100:
        tree = around(truth[len(ids) - 1 : len(ids) + 8], dice)
        verdict = backend.verify(proposal(tree))
        right = verdict.branches
        assert right is not None
        branched += right.ranks != tuple(range(1, len(right.ranks) + 1))
        keep = dice.randint(1, verdict.accepted + 1)
        backend.commit(keep)
        ids += verdict.tokens[:keep]
        assert ids == truth[: len(ids)]
    assert branched > 5
    reached = backend.rewind(len(PROMPT) + 80)
    backend.extend(truth[reached - len(PROMPT) : 90])
    assert backend.sample() == truth[90]


def around(truth: list[int], dice: random.Random) -> Tree:
    """A tree behind ``truth[0]`` with a part of ``truth`` on some rows, and other ids on others."""
    ids, parents, depths, spine = [truth[0]], [0], [0], [0]
    for _ in range(dice.randint(2, 12)):
        if len(spine) < len(truth) and dice.random() < 0.5:
            parent, token = spine[-1], truth[len(spine)]
            spine.append(len(ids))
        else:
            parent = dice.randrange(len(ids))
            right = truth[depths[parent] + 1 : depths[parent] + 2]
            token = ((right or [0])[0] + 1 + len(ids)) % 100
        ids.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    sees = torch.eye(len(ids), dtype=torch.bool)
    for row, parent in enumerate(parents):
        sees[row] |= sees[parent]
    return Tree(torch.tensor(ids), torch.tensor(parents), torch.tensor(depths), sees)


def proposal(tree: Tree) -> Any:
    from dflash_local.backends.torch_backend import TorchProposal
    from dflash_local.backends.torch_probs import Drafted

    return TorchProposal(tree.ids, Drafted(tree.ids[1:]), None, tree)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(branching=False),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(repetition_penalty=1.2),
    ],
    ids=["as asked", "sampling", "penalties"],
)
def test_what_does_not_branch_drafts_paths(sampling: SamplingParams, tmp_path: Path) -> None:
    backend = pair(tmp_path, loop_pair)
    backend.configure(sampling)
    assert backend.info.rows(sampling) == backend.info.block_size
    backend.extend(PROMPT)
    pending = backend.sample()
    for _ in range(5):
        verdict = one_round(backend, pending, 3)
        assert verdict.branches is None
        pending = verdict.next
