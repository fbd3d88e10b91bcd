"""Where the host meets the device: submitting work, and waiting for a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

submit: Callable[..., None] = mx.async_eval
"""Start computing arrays, or trees of them, without waiting."""

wait: Callable[..., None] = mx.eval
"""Compute arrays, or trees of them, now."""


def read_ints(array: mx.array) -> list[int]:
    """Wait for a vector of integers."""
    return cast(list[int], cast(Any, array).tolist())


def read_float(array: mx.array) -> float:
    """Wait for one number."""
    return float(cast(Any, array).item())
