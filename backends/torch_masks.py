"""Which columns of K/V the rows of a forward see, bool ``[rows, past + rows + spare]``.

``past`` earlier columns, the rows themselves, then ``spare`` columns that make the number round.
"""

from __future__ import annotations

import torch

from .torch_tree import Tree


def band_visible(
    rows: int, past: int, spare: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """For rows that follow each other."""
    queries = torch.arange(past, past + rows, device=device)[:, None]
    keys = torch.arange(past + rows + spare, device=device)[None, :]
    visible = keys <= queries
    if window is not None:
        visible &= queries - keys < window
    return visible


def tree_visible(tree: Tree, past: int, spare: int, window: int | None) -> torch.Tensor:
    """For the rows of a tree."""
    rows, device = len(tree.ids), tree.ids.device
    visible = torch.ones((rows, past + rows + spare), dtype=torch.bool, device=device)
    visible[:, past : past + rows] = tree.sees
    visible[:, past + rows :] = False
    if window is not None:
        columns = torch.arange(past, device=device)
        visible[:, :past] &= past + tree.depths[:, None] - columns < window
        visible[:, past : past + rows] &= tree.depths[:, None] - tree.depths < window
    return visible


def visible_columns(distance: torch.Tensor, window: int | None, causal: bool) -> torch.Tensor:
    """For a draft's block, from the distances back to the columns ``[rows, columns]``."""
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if window is None else visible & (distance.abs() < window)
