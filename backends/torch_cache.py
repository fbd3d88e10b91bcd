"""Preallocated K/V: written by index, cropped by a number, never concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .torch_attention import empty_keys


class KVCache:
    """K and V of every layer for positions ``0 .. length - 1``.

    A forward writes its rows behind ``length`` and sees them at once; ``advance`` makes them
    part of the cache, so a crop, or forgetting a failed forward, is an assignment. Sliding layers
    keep all rows, which makes any crop exact, and read only their window.

    Args:
        windows: per layer, the rows that a query sees, itself included; None is all.
        kv_heads: K/V heads of a layer.
        head_dim: size of a head.
        capacity: positions to hold.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.length = 0
        self.capacity = capacity
        self.windows = tuple(windows)
        # Uninitialised on purpose: pages that no row reached yet cost nothing on the CPU.
        shape = (len(self.windows), 1, kv_heads, capacity, head_dim)
        self._keys = empty_keys(shape, dtype, device)
        self._values = torch.empty(shape, dtype=dtype, device=device)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new rows and return what its queries may see.

        Called by the attention layers of transformers; the shapes are ``[1, kv_heads, rows, dim]``.
        """
        rows = key_states.shape[2]
        first, end = self.first_visible(layer_idx), self.length + rows
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, first:end], values[:, :, first:end]

    def first_visible(self, layer: int) -> int:
        """The first position that any row behind ``length`` sees in a layer."""
        window = self.windows[layer]
        return 0 if window is None else max(0, self.length - window + 1)

    def advance(self, rows: int) -> None:
        """Make the first ``rows`` rows behind ``length`` part of the cache."""
        self.length += rows

    def crop(self, length: int) -> None:
        """Forget every position from ``length`` on."""
        self.length = min(self.length, length)

    @property
    def bytes(self) -> int:
        """Size of the buffers."""
        return 2 * self._values.numel() * self._values.element_size()


def visible_rows(start: int, rows: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Bool ``[rows, length]``: what each of ``rows`` causal queries from ``start`` sees.

    Columns begin at the first position that any row sees, as ``KVCache.update`` returns them.
    """
    first = 0 if window is None else max(0, start - window + 1)
    queries = torch.arange(start, start + rows, device=device)[:, None]
    keys = torch.arange(first, start + rows, device=device)[None, :]
    if window is None:
        return keys <= queries
    return (keys <= queries) & (queries - keys < window)
