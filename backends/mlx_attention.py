"""Attention of a few rows over a long context.

The fast kernel serves calls whose rows times query heads per K/V head stay within 32; wider calls
over a long context cost more than several narrow ones.
"""

from __future__ import annotations

import mlx.core as mx

FAST_ROWS = 32
"""Rows times query heads per K/V head that one call of the fast kernel takes."""
LONG = 4096
"""Context rows from which splitting pays."""


def attention(
    query: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """``[1, heads, rows, dim]`` queries over K/V; ``mask`` is bool ``[rows, keys]``."""
    rows = query.shape[2]
    most = max(1, FAST_ROWS * keys.shape[1] // query.shape[1])
    if rows <= most or keys.shape[2] < LONG:
        most = rows
    parts = [
        mx.fast.scaled_dot_product_attention(
            query[:, :, low : low + most],
            keys,
            values,
            scale=scale,
            mask=None if mask is None else mask[low : low + most],
        )
        for low in range(0, rows, most)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
