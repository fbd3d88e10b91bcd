"""K/V caches of one layer: every position, or a window of them.

Rows are always in temporal order. New rows are written behind the counted ones and seen at once;
going back is setting a number. Both classes serve the target's layers, which call
``update_and_fetch``, and the draft's, which also look at block rows without keeping them.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

STEP = 256
REACH = 512
"""Rows that a window keeps beyond what its queries see, so that it can go back that far."""


class LayerCache(Protocol):
    """What one layer of a target remembers."""

    offset: int
    """Positions covered."""

    def commit(self, length: int) -> None:
        """Forget what was written from ``length`` on, which lies in the last block."""
        ...

    def reaches(self, length: int) -> bool:
        """Whether ``restore`` can go back to ``length`` without a saved state."""
        ...

    def save(self) -> Any:
        """What ``restore`` needs, beyond what stays in the cache, to come back to here."""
        ...

    def restore(self, length: int, saved: Any) -> None:
        """Go back to ``length``: where ``saved`` was made, or, without it, where it reaches."""
        ...

    def arrays(self) -> list[mx.array]:
        """Everything held, to be evaluated."""
        ...


class FullCache:
    """K/V of every position; ``packs`` keeps them in 8 bits."""

    def __init__(self, *, packs: bool = False) -> None:
        self.offset = 0
        self._packs = packs
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Count new rows ``[1, heads, rows, dim]`` in and return all that their queries see."""
        seen = self.peek(keys, values)
        self.offset += keys.shape[2]
        return seen

    def peek(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same without counting the rows in: the next ones will overwrite them."""
        end, dtype = self.offset + keys.shape[2], keys.dtype
        if self._packs:
            keys, values = packed(keys), packed(values)
        self._keys = _grown(self._keys, keys, self.offset, end)
        self._values = _grown(self._values, values, self.offset, end)
        self._keys[..., self.offset : end, :] = keys
        self._values[..., self.offset : end, :] = values
        seen = self._keys[..., :end, :], self._values[..., :end, :]
        return (unpacked(seen[0], dtype), unpacked(seen[1], dtype)) if self._packs else seen

    def mask(self, rows: int) -> mx.array | str | None:
        """What ``rows`` causal queries behind the cache see."""
        return None if rows == 1 else "causal"

    def rewrite(self, position: int, keys: mx.array, values: mx.array) -> None:
        """Put rows in the place of those written at ``position`` and behind it."""
        assert self._keys is not None
        assert self._values is not None
        if self._packs:
            keys, values = packed(keys), packed(values)
        end = position + keys.shape[2]
        self._keys[..., position:end, :] = keys
        self._values[..., position:end, :] = values

    def commit(self, length: int) -> None:
        """Count only the first ``length`` rows."""
        self.offset = length

    def reaches(self, length: int) -> bool:
        """Every position is there."""
        return length <= self.offset

    def save(self) -> None:
        """The rows stay in the cache."""

    def restore(self, length: int, saved: Any) -> None:
        """Count only the first ``length`` rows."""
        self.offset = length

    def arrays(self) -> list[mx.array]:
        """Both buffers."""
        return [a for a in (self._keys, self._values) if a is not None]


class WindowCache:
    """K/V of the last positions: a query sees itself and ``window - 1`` rows before it."""

    def __init__(self, window: int, *, packs: bool = False) -> None:
        self.window = window
        self._packs = packs
        self.offset = 0
        self.first = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def visible(self) -> int:
        """Counted rows that the next query sees."""
        return min(self.window - 1, self.offset - self.first)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Count new rows ``[1, heads, rows, dim]`` in and return all that their queries see."""
        seen = self.peek(keys, values)
        self.offset += keys.shape[2]
        return seen

    def peek(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same without counting the rows in: the next ones will overwrite them."""
        rows, dtype = keys.shape[2], keys.dtype
        if self._packs:
            keys, values = packed(keys), packed(values)
        kept_keys, kept_values = self._keys, self._values
        if (
            kept_keys is None
            or kept_values is None
            or self.offset - self.first + rows > kept_keys.shape[2]
        ):
            kept_keys, kept_values = self._rebase(keys, values)
        start = self.offset - self.first
        low, end = start - self.visible, start + rows
        kept_keys[..., start:end, :] = keys
        kept_values[..., start:end, :] = values
        seen = kept_keys[..., low:end, :], kept_values[..., low:end, :]
        return (unpacked(seen[0], dtype), unpacked(seen[1], dtype)) if self._packs else seen

    def mask(self, rows: int) -> mx.array | str | None:
        """What ``rows`` causal queries behind the cache see of the rows returned to them."""
        if rows == 1:
            return None
        if self.visible + rows <= self.window:
            return "causal"
        distance = mx.arange(self.visible, self.visible + rows)[:, None]
        distance = distance - mx.arange(self.visible + rows)[None]
        return (distance >= 0) & (distance < self.window)

    def commit(self, length: int) -> None:
        """Count rows up to ``length``."""
        self.offset = length

    def reaches(self, length: int) -> bool:
        """Whether every row that a query at ``length`` sees is still held."""
        if length > self.offset:
            return False
        return self.first == 0 or length - self.first >= self.window - 1

    def save(self) -> tuple[int, mx.array, mx.array] | None:
        """A copy of the visible rows; None where nothing was written yet."""
        if self._keys is None or self._values is None:
            return None
        end = self.offset - self.first
        low = end - self.visible
        keys = mx.contiguous(self._keys[..., low:end, :])
        values = mx.contiguous(self._values[..., low:end, :])
        return self.first + low, keys, values

    def restore(self, length: int, saved: Any) -> None:
        """Count rows up to ``length`` where they are held; else take the saved ones.

        Without either, older rows are missing, which only a draft may bear.
        """
        if not self.reaches(length) and saved is not None:
            self.first, keys, values = saved
            # New names for the same rows: an assignment into them must not reach the saved ones.
            self._keys, self._values = mx.array(keys), mx.array(values)
        self.first = min(self.first, length)
        self.offset = length

    def arrays(self) -> list[mx.array]:
        """Both buffers."""
        return [a for a in (self._keys, self._values) if a is not None]

    def _rebase(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Move the newest rows to the front of fresh buffers."""
        start, rows = self.offset - self.first, keys.shape[2]
        held = min(start, self.window - 1 + REACH)
        capacity = _rounded(held + max(rows, STEP))
        self._keys = _moved(self._keys, keys, start - held, start, capacity)
        self._values = _moved(self._values, values, start - held, start, capacity)
        self.first = self.offset - held
        return self._keys, self._values


_SCALE_BYTES = 4


def packed(rows: mx.array) -> mx.array:
    """Rows ``[..., dim]`` as bytes ``[..., dim + 4]``: 8 bits a number, and a scale in fp32."""
    exact = rows.astype(mx.float32)
    scale = mx.maximum(mx.abs(exact).max(axis=-1, keepdims=True), 1e-6) / 127.0
    steps = mx.clip(mx.round(exact / scale), -127.0, 127.0).astype(mx.int8)
    return mx.concatenate([steps.view(mx.uint8), scale.view(mx.uint8)], axis=-1)


def unpacked(rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """What ``packed`` kept, as numbers."""
    dim = rows.shape[-1] - _SCALE_BYTES
    steps, scale = rows[..., :dim].view(mx.int8), rows[..., dim:].view(mx.float32)
    return (steps.astype(mx.float32) * scale).astype(dtype)


def _rounded(rows: int) -> int:
    return (rows + STEP - 1) // STEP * STEP


def _grown(buffer: mx.array | None, like: mx.array, used: int, need: int) -> mx.array:
    """The buffer, or a larger one with its first ``used`` rows.

    It grows by an eighth, so that copying costs the same per row at every length.
    """
    if buffer is not None and need <= buffer.shape[2]:
        return buffer
    return _moved(buffer, like, 0, used, _rounded(need + used // 8))


def _moved(buffer: mx.array | None, like: mx.array, low: int, end: int, capacity: int) -> mx.array:
    """A buffer of ``capacity`` rows that begins with rows ``low`` to ``end`` of another."""
    fresh = mx.zeros((1, like.shape[1], capacity, like.shape[3]), like.dtype)
    if buffer is not None and end > low:
        fresh[..., : end - low, :] = buffer[..., low:end, :]
    return fresh
