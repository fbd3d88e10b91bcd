"""Gated DeltaNet layers: their state, and their forward with the recurrence's inputs kept.

A state cannot be cropped. During a verify each layer keeps what the recurrence read, and a commit
runs the recurrence again over the kept rows from the state before; no projection is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk


class DeltaState(NamedTuple):
    """State of a layer after some position; its arrays are never written into."""

    window: mx.array | None
    """The last rows before the convolution, ``[1, kernel - 1, channels]``."""
    matrix: mx.array | None
    """``[1, heads, value dim, key dim]``."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the recurrence read in one pass, and where it began."""

    start: int
    matrix: mx.array | None
    conv: mx.array
    q: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array
    A_log: mx.array
    dt_bias: mx.array

    def after(self, rows: int) -> DeltaState:
        """The state after the first ``rows`` rows."""
        _, matrix = gated_delta_update(
            self.q[:, :rows],
            self.k[:, :rows],
            self.v[:, :rows],
            self.a[:, :rows],
            self.b[:, :rows],
            self.A_log,
            self.dt_bias,
            self.matrix,
        )
        kept = self.conv.shape[1] - self.q.shape[1]
        return DeltaState(mx.contiguous(self.conv[:, rows : rows + kept]), matrix)


class DeltaCache:
    """The state of one Gated DeltaNet layer."""

    def __init__(self) -> None:
        self.offset = 0
        self.state = DeltaState(None, None)
        self._inputs: _Inputs | None = None

    def advance(self, rows: int, state: DeltaState, inputs: _Inputs | None) -> None:
        """Take the state after ``rows`` more rows; ``inputs`` makes them revocable."""
        self.offset += rows
        self.state = state
        self._inputs = inputs

    def commit(self, length: int) -> None:
        """Go back inside the last pass, which must have kept its inputs."""
        if length != self.offset:
            assert self._inputs is not None
            self.state = self._inputs.after(length - self._inputs.start)
            self.offset = length
        self._inputs = None

    def reaches(self, length: int) -> bool:
        """Only where it is."""
        return length == self.offset

    def save(self) -> DeltaState:
        """The state itself: later passes make new arrays."""
        return self.state

    def restore(self, length: int, saved: Any) -> None:
        """Take a saved state, unless it is there already."""
        self._inputs = None
        if length != self.offset:
            self.state, self.offset = saved, length

    def arrays(self) -> list[mx.array]:
        """Window and matrix."""
        return [a for a in (self.state.window, self.state.matrix) if a is not None]


def is_delta(layer: Any) -> bool:
    """Whether a decoder layer's mixer is a Gated DeltaNet that ``delta_layer`` can run."""
    mixer = getattr(layer, "linear_attn", None)
    return mixer is not None and ("in_proj_qkv" in mixer or "in_proj_qkvz" in mixer)


def delta_layer(layer: Any, x: mx.array, cache: DeltaCache, *, revocable: bool) -> mx.array:
    """One decoder layer of Qwen3-Next or Qwen3.5 whose mixer is a Gated DeltaNet."""
    mixed = _mix(layer.linear_attn, layer.input_layernorm(x), cache, revocable)
    x = x + mixed
    out: mx.array = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


def _mix(mixer: Any, x: mx.array, cache: DeltaCache, revocable: bool) -> mx.array:
    """The mixer's own forward, step by step, so that the recurrence's inputs can be kept."""
    rows = x.shape[1]
    qkv, z, b, a = _projected(mixer, x)
    kernel = mixer.conv_kernel_size
    window = cache.state.window
    if window is None:
        window = mx.zeros((1, kernel - 1, qkv.shape[-1]), dtype=x.dtype)
    conv = mx.concatenate([window, qkv], axis=1)
    out = nn.silu(mixer.conv1d(conv))
    q, k, v = mx.split(out, [mixer.key_dim, 2 * mixer.key_dim], axis=-1)
    q = q.reshape(1, rows, mixer.num_k_heads, mixer.head_k_dim)
    k = k.reshape(1, rows, mixer.num_k_heads, mixer.head_k_dim)
    v = v.reshape(1, rows, mixer.num_v_heads, mixer.head_v_dim)
    q, k = normalize_qk(q, k, inv_scale=mixer.head_k_dim**-0.5, eps=1e-6)
    y, matrix = gated_delta_update(q, k, v, a, b, mixer.A_log, mixer.dt_bias, cache.state.matrix)
    inputs = None
    if revocable:
        inputs = _Inputs(
            cache.offset, cache.state.matrix, conv, q, k, v, a, b, mixer.A_log, mixer.dt_bias
        )
    state = DeltaState(mx.contiguous(conv[:, rows:]), matrix)
    cache.advance(rows, state, inputs)
    mixed: mx.array = mixer.out_proj(mixer.norm(y, z).reshape(1, rows, -1))
    return mixed


def _projected(mixer: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """q/k/v joined as the convolution reads them, the output gate, and the two gate inputs."""
    rows = x.shape[1]
    if "in_proj_qkv" in mixer:
        z = mixer.in_proj_z(x).reshape(1, rows, mixer.num_v_heads, mixer.head_v_dim)
        return mixer.in_proj_qkv(x), z, mixer.in_proj_b(x), mixer.in_proj_a(x)
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(x), mixer.in_proj_ba(x)
    )
    joined = mx.concatenate([t.reshape(1, rows, -1) for t in (q, k, v)], axis=-1)
    return joined, z, b, a
