"""The selector's steps as a tree takes them: pairs are weighed, and no candidate grows by it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dflash_local.draft_config import DFlash2Config

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
VOCAB, HIDDEN, SLOTS, WIDTH = 20, 8, 3, 4
CONFIG = DFlash2Config(0, 1, 2, WIDTH)
ANCHOR = 7


def by_torch(tensors: Tensors, states: Array, candidates: Array, unary: Array) -> Array:
    import torch

    from dflash_local.backends.torch_draft2 import Selector

    selector = Selector({name: torch.from_numpy(t) for name, t in tensors.items()}, CONFIG)
    parts = (states, np.array([ANCHOR]), candidates, unary[:, None])
    return np.asarray(selector.steps(*map(torch.from_numpy, parts)))


def by_mlx(tensors: Tensors, states: Array, candidates: Array, unary: Array) -> Array:
    import mlx.core as mx

    from dflash_local.backends.mlx_draft2 import Selector
    from dflash_local.backends.mlx_probs import Lattice

    selector = Selector({name: mx.array(t) for name, t in tensors.items()}, CONFIG)
    alone = Lattice(
        mx.array(candidates.astype(np.int32)),
        mx.broadcast_to(mx.array(unary)[:, None], (SLOTS, WIDTH, WIDTH)),
    )
    return np.asarray(selector.linked(alone, mx.array(states), mx.array([ANCHOR])).scores)


Linking = Callable[[Tensors, Array, Array, Array], Array]
each_way = pytest.mark.parametrize(
    "steps", [way for name, way in (("torch", by_torch), ("mlx", by_mlx)) if find_spec(name)]
)


def inputs(books: int = VOCAB) -> tuple[Tensors, Array, Array, Array]:
    draws = np.random.default_rng(5)

    def normal(*shape: int) -> Array:
        return draws.standard_normal(shape).astype(np.float32)

    tensors = {
        "candidate_selector.predecessor_codebook": normal(books, 2),
        "candidate_selector.successor_codebook": normal(books, 2),
        "candidate_selector.hidden_projection.weight": normal(2, HIDDEN),
    }
    candidates = np.stack([draws.permutation(VOCAB)[:WIDTH] for _ in range(SLOTS)])
    scores = 2 * normal(SLOTS, VOCAB)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return tensors, normal(SLOTS, HIDDEN), candidates, np.take_along_axis(logs, candidates, -1)


@each_way
def test_steps_follow_the_formula_and_keep_the_candidates_share(steps: Linking) -> None:
    tensors, states, candidates, unary = inputs()
    found = steps(tensors, states, candidates, unary)
    before, after, projection = tensors.values()
    for slot in range(SLOTS):
        gate = projection @ states[slot]
        for way in range(WIDTH):
            last = ANCHOR if slot == 0 else candidates[slot - 1, way]
            said = unary[slot] + after[candidates[slot]] @ (before[last] * gate)
            shares = np.exp(said) / np.exp(said).sum() * np.exp(unary[slot]).sum()
            np.testing.assert_allclose(np.exp(found[slot, way]), shares, rtol=1e-4)


@each_way
def test_a_codebook_of_zeros_changes_nothing(steps: Linking) -> None:
    tensors, states, candidates, unary = inputs()
    tensors["candidate_selector.successor_codebook"] *= 0
    found = steps(tensors, states, candidates, unary)
    expected = np.broadcast_to(unary[:, None], found.shape)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@each_way
def test_ids_beyond_the_codebooks_are_candidates_too(steps: Linking) -> None:
    found = steps(*inputs(books=9))
    assert np.isfinite(found).all()
