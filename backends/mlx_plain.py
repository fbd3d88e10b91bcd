"""Targets of any other architecture, run whole by the library: plain decoding only."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from .mlx_history import History
from .mlx_target import Pass
from .mlx_tree import Tree


class LibraryCaches:
    """All the caches of a library model, as one."""

    def __init__(self, model: Any) -> None:
        self.offset = 0
        self.parts: list[Any] = make_prompt_cache(model)

    def commit(self, length: int) -> None:
        """Rows cannot be taken back here."""
        assert length == self.offset

    def reaches(self, length: int) -> bool:
        """Where it is, and every earlier position if all parts can be trimmed."""
        return length == self.offset or (length < self.offset and can_trim_prompt_cache(self.parts))

    def save(self) -> list[Any] | None:
        """A copy, where trimming does not do."""
        return None if can_trim_prompt_cache(self.parts) else copy.deepcopy(self.parts)

    def restore(self, length: int, saved: Any) -> None:
        """Trim, or take the copy."""
        if length < self.offset and can_trim_prompt_cache(self.parts):
            trim_prompt_cache(self.parts, self.offset - length)
        elif length < self.offset:
            self.parts = copy.deepcopy(saved)
        self.offset = length

    def arrays(self) -> list[mx.array]:
        """Everything held."""
        leaves = tree_flatten([part.state for part in self.parts])
        return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


class PlainTarget:
    """A target without taps.

    Args:
        model: a language model of mlx-lm, evaluated.
        config: its ``config.json``.
    """

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        self._model = model
        self._caches = LibraryCaches(model)
        self.history = History(self._make_caches)
        text = config.get("text_config") or config
        self.vocab_size = int(text["vocab_size"])
        weights = [a for _, a in tree_flatten(model.parameters())]
        self.bytes = sum(a.nbytes for a in weights)
        self.dtype: mx.Dtype = next(a.dtype for a in weights if mx.issubdtype(a.dtype, mx.floating))

    @property
    def branching(self) -> bool:
        """Never: there is no draft."""
        return False

    def forward(self, ids: mx.array, *, revocable: bool = False, tree: Tree | None = None) -> Pass:
        """Run ids behind the caches; ``revocable`` is possible for one row only."""
        assert tree is None
        assert not revocable or ids.shape[0] == 1
        logits = self._model(ids[None], cache=self._caches.parts)[0]
        self._caches.offset += ids.shape[0]
        return Pass(logits, None)

    def gather(self, rows: Sequence[int]) -> None:
        """There are no trees."""

    def logits(self, hidden: mx.array) -> mx.array:
        """The forward gave them already."""
        return hidden

    def _make_caches(self) -> list[LibraryCaches]:
        self._caches = LibraryCaches(self._model)
        return [self._caches]


def unrevocable_kinds(model: Any) -> list[str]:
    """Class names of the library's caches that keep more than trimmable K/V."""
    names = {type(cache).__name__ for cache in make_prompt_cache(model)}
    return sorted(names - {"KVCache"})
