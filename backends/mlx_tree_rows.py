"""How a tree's rows pass through a layer of the library, which knows paths alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .mlx_cache import FullCache


class TreeRows:
    """A layer's cache for the forward of one tree: the rows stand where their depth says.

    Args:
        cache: where the rows are written.
        positions: theirs, ``[rows]``.
    """

    def __init__(self, cache: FullCache, positions: mx.array) -> None:
        self._cache, self._begin = cache, cache.offset
        self._written: tuple[mx.array, mx.array] | None = None
        self.offset = positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As the cache's own."""
        self._written = keys, values
        return self._cache.update_and_fetch(keys, values)

    def gather(self, first: int, rows: mx.array) -> None:
        """Put these rows behind the first ones.

        From what was written, not from the cache: a buffer that is read cannot be written in
        place, and would be copied whole.
        """
        assert self._written is not None
        keys, values = self._written
        self._cache.rewrite(self._begin + first, keys[..., rows, :], values[..., rows, :])


class RowRope:
    """A layer's rotary embedding that also takes a position per row.

    The library's takes one per sequence, so rows become sequences for as long as it lasts.
    """

    def __init__(self, rope: Any) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate ``[1, heads, rows, dim]``."""
        if isinstance(offset, int):
            turned: mx.array = self._rope(x, offset=offset)
            return turned
        turned = self._rope(x.transpose(2, 1, 0, 3), offset=offset)
        return turned.transpose(2, 1, 0, 3)


def take_trees(layers: Sequence[Any]) -> None:
    """Let the layers of a loaded model take a position per row."""
    for layer in layers:
        layer.self_attn.rope = RowRope(layer.self_attn.rope)
