"""Trees as a draft might have grown them, around a text that is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from dflash_local.backend import Proposal


def around(truth: Sequence[int], dice: random.Random) -> tuple[list[int], list[int]]:
    """Ids and parents of a tree behind ``truth[0]`` that has a part of ``truth`` on some rows."""
    ids, parents, depths, spine = [truth[0]], [0], [0], [0]
    for _ in range(dice.randint(2, 12)):
        if len(spine) < len(truth) and dice.random() < 0.5:
            parent, token = spine[-1], truth[len(spine)]
            spine.append(len(ids))
        else:
            parent = dice.randrange(len(ids))
            right = [*truth, 0][depths[parent] + 1]
            token = (right + 1 + len(ids)) % 100
        ids.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return ids, parents


def proposal(name: str, ids: list[int], parents: list[int]) -> Proposal:
    """As the backend would have drafted it."""
    sees = np.eye(len(ids), dtype=bool)
    for row, parent in enumerate(parents):
        sees[row] |= sees[parent]
    parts = (ids, parents, (sees.sum(axis=-1) - 1).tolist(), sees.tolist())
    if name == "mlx":
        import mlx.core as mx

        from dflash_local.backends.mlx_backend import MlxProposal
        from dflash_local.backends.mlx_tree import Tree as MlxTree

        tree = MlxTree(*map(mx.array, parts))
        made: Proposal = MlxProposal(ids[0], None, len(ids) - 1, tree)
        return made
    import torch

    from dflash_local.backends.torch_backend import TorchProposal
    from dflash_local.backends.torch_probs import Drafted
    from dflash_local.backends.torch_tree import Tree

    grown = Tree(*map(torch.tensor, parts))
    made = TorchProposal(grown.ids, Drafted(grown.ids[1:]), None, grown)
    return made
