"""The DFlash draft: context K/V from tapped target states, a block of ids from one pass.

Formulas, names and tensor layout follow the published reference; what version 2 adds lies in
``mlx_draft2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import mlx.core as mx

from dflash_local.draft_config import DraftConfig

from .mlx_advice import Asked
from .mlx_attention import attention
from .mlx_cache import FullCache, WindowCache
from .mlx_choice import Chooser
from .mlx_draft2 import Convolution, Selector
from .mlx_host import wait
from .mlx_linear import Linear, linear
from .mlx_probs import Drafted
from .mlx_tree import Tree, grow, independent

Rows = Callable[[mx.array], mx.array]
Adjust = Callable[[mx.array, mx.array | None], mx.array]
"""Penalties on scores ``[count, vocab]``, with ids behind those that are committed."""


class Draft(Protocol):
    """What proposes ids for a target; it lives on the target's tapped states."""

    @property
    def length(self) -> int:
        """Context positions covered."""
        ...

    def append(self, features: mx.array) -> None:
        """Take the tapped states ``[rows, taps * hidden]`` of the next positions as context."""
        ...

    def propose(self, asked: Asked, count: int, chooser: Chooser, adjust: Adjust) -> Drafted:
        """``count`` ids after an anchor right behind the context."""
        ...

    def branch(self, asked: Asked, count: int) -> Tree:
        """A tree of ``count`` ids behind an anchor."""
        ...

    def crop(self, length: int) -> None:
        """Forget every context position from ``length`` on."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...

    def cache_arrays(self) -> list[mx.array]:
        """The context, to be evaluated."""
        ...

    @property
    def bytes(self) -> int:
        """Size of the weights."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one draft layer; projections that read the same input are one product."""

    input_norm: mx.array
    qkv: Linear
    q_norm: mx.array
    k_norm: mx.array
    out: Linear
    post_norm: mx.array
    gate_up: Linear
    down: Linear
    attention_conv: Convolution | None
    mlp_conv: Convolution | None


class MlxDraft:
    """A draft bound to its target's embedding and head.

    Args:
        config: the draft's numbers.
        weights: the checkpoint's tensors under their published names.
        embed: the target's input embedding, as its first layer reads it.
        head: the target's bare output head.
        bits: packs the linear layers where given.
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: Mapping[str, mx.array],
        embed: Rows,
        head: Rows,
        bits: int | None = None,
    ) -> None:
        self.config = config
        self._embed, self._head = embed, head
        self.dtype = weights["norm.weight"].dtype
        self._hidden_norm, self._norm = weights["hidden_norm.weight"], weights["norm.weight"]
        self._fc = linear([weights["fc.weight"]], bits=bits)
        self._layers = [_layer(weights, i, config, bits) for i in range(config.layers)]
        offsets = weights.get("d2t")
        self._ids = None if offsets is None else mx.arange(offsets.shape[0]) + offsets
        """The target's ids of a reduced vocabulary; None where there is only one vocabulary."""
        self.selector = None if config.v2 is None else Selector(weights, config.v2)
        """Chooses a path through the slots' best ids; None where slots are independent."""
        self._context_kv = _context_kv(weights, config, bits)
        inverse = config.rope.inverse_frequencies(config.head_dim)
        self._periods = mx.array([1.0 / f for f in inverse], dtype=mx.float32)
        self.reset()
        wait(self._weights())

    @property
    def length(self) -> int:
        """Context positions covered."""
        return self._caches[0].offset

    def reset(self) -> None:
        """Forget everything."""
        self._caches = [
            FullCache() if window is None else WindowCache(window) for window in self.config.windows
        ]

    def crop(self, length: int) -> None:
        """Forget every context position from ``length`` on.

        A window that has moved on lacks its oldest rows then; this costs a little acceptance.
        """
        for cache in self._caches:
            cache.restore(min(length, cache.offset), None)

    def append(self, features: mx.array) -> None:
        """Project tapped states into the context K/V of every layer."""
        config, rows = self.config, features.shape[0]
        context = self._rms(self._fc(features.astype(self.dtype)), self._hidden_norm)
        kv = self._context_kv(context)
        kv = kv.reshape(rows, config.layers, 2, config.kv_heads, config.head_dim)
        kv = kv.transpose(1, 2, 3, 0, 4)
        for index, (layer, cache) in enumerate(zip(self._layers, self._caches, strict=True)):
            keys = self._rope(self._rms(kv[index, 0][None], layer.k_norm), cache.offset)
            cache.update_and_fetch(keys, kv[index, 1][None])

    def propose(self, asked: Asked, count: int, chooser: Chooser, adjust: Adjust) -> Drafted:
        """Ids for the ``count`` slots behind an anchor."""
        anchor = asked.anchor
        states = self.slots(anchor, count)
        scores = asked.advise(adjust(self.scores(states), anchor))
        if self.selector is None:
            return chooser.draft(scores)
        return chooser.path(self.selector.lattice(scores, states, anchor))

    def branch(self, asked: Asked, count: int) -> Tree:
        """The ``count`` likeliest continuations of an anchor."""
        anchor = asked.anchor
        states = self.slots(anchor, min(count, self.config.block_size - 1))
        scores = asked.advise(self.scores(states))
        if self.selector is None:
            return grow(anchor, independent(scores, count), count)
        alone = independent(scores, self.selector.width)
        return grow(anchor, self.selector.linked(alone, states, anchor), count)

    def slots(self, anchor: mx.array, count: int) -> mx.array:
        """States ``[count, hidden]`` of the slots behind ``anchor``, an id of shape ``[1]``."""
        masks = mx.full((count,), self.config.mask_token_id, dtype=anchor.dtype)
        return self.hidden(mx.concatenate([anchor, masks]))[1:]

    def scores(self, states: mx.array) -> mx.array:
        """Logits ``[count, vocab]`` of slots, from their states."""
        config, scores = self.config, self._head(states)
        if config.output_multiplier != 1.0:
            scores = scores * config.output_multiplier
        if config.final_logit_softcapping is not None:
            scores = scores.astype(mx.float32) / config.final_logit_softcapping
            scores = config.final_logit_softcapping * mx.tanh(scores)
        if self._ids is None:
            return scores
        assert config.vocab_size is not None
        whole = mx.full((scores.shape[0], config.vocab_size), -mx.inf, dtype=scores.dtype)
        ids = mx.broadcast_to(self._ids, scores.shape)
        return mx.put_along_axis(whole, ids, scores, axis=-1)

    def hidden(self, block: mx.array) -> mx.array:
        """States ``[rows, hidden]`` after the final norm for block ids that follow the context."""
        scale = self.config.input_embedding_scale
        x = self._embed(block).astype(self.dtype)
        x = x if scale == 1.0 else x * scale
        masks: dict[tuple[int | None, bool], mx.array | None] = {}
        for index, layer in enumerate(self._layers):
            key = (self.config.windows[index], self.config.causal[index])
            if key not in masks:
                masks[key] = self._mask(block.shape[0], self._caches[index], key[1])
            attend = partial(self._attend, index, masks[key])
            x = x + _around(layer.attention_conv, self._rms(x, layer.input_norm), attend)
            feed = partial(_feed_forward, layer)
            x = x + _around(layer.mlp_conv, self._rms(x, layer.post_norm), feed)
        return self._rms(x, self._norm)

    def context(self, layer: int) -> tuple[mx.array, mx.array]:
        """Context K and V of a layer that it can still see, for checks."""
        cache = self._caches[layer]
        keys, values = cache.arrays()
        end = cache.offset - (cache.first if isinstance(cache, WindowCache) else 0)
        return keys[..., :end, :], values[..., :end, :]

    def cache_arrays(self) -> list[mx.array]:
        """The context, to be evaluated."""
        return [a for cache in self._caches for a in cache.arrays()]

    @property
    def bytes(self) -> int:
        """Size of the weights."""
        return sum(a.nbytes for a in self._weights())

    def _attend(self, index: int, mask: mx.array | None, x: mx.array) -> mx.array:
        config, layer, cache = self.config, self._layers[index], self._caches[index]
        rows, heads = x.shape[0], config.heads
        joined = layer.qkv(x).reshape(1, rows, -1, config.head_dim).transpose(0, 2, 1, 3)
        query, keys, values = mx.split(joined, [heads, heads + config.kv_heads], axis=1)
        query = self._rope(self._rms(query, layer.q_norm), cache.offset)
        keys = self._rope(self._rms(keys, layer.k_norm), cache.offset)
        # Block rows are written behind the context and never counted.
        keys, values = cache.peek(keys, values)
        out = attention(query, keys, values, config.head_dim**-0.5, mask)
        return layer.out(out.transpose(0, 2, 1, 3).reshape(rows, -1))

    def _mask(self, rows: int, cache: FullCache | WindowCache, causal: bool) -> mx.array | None:
        """Bool ``[rows, visible + rows]``; None where every block row sees everything."""
        before, window = cache.offset, None
        if isinstance(cache, WindowCache):
            before, window = cache.visible, cache.window
        if window is None and not causal:
            return None
        distance = mx.arange(before, before + rows)[:, None] - mx.arange(before + rows)[None]
        visible = distance >= 0 if causal else distance > -(before + rows)
        return visible if window is None else visible & (mx.abs(distance) < window)

    def _rms(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self.config.rms_norm_eps)

    def _rope(self, x: mx.array, offset: int) -> mx.array:
        """Rotary embedding in half-rotation form of ``[1, heads, rows, dim]``."""
        factor = self.config.rope.attention_factor
        x = x if factor == 1.0 else x * factor
        return mx.fast.rope(
            x,
            self.config.head_dim,
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._periods,
        )

    def _weights(self) -> list[mx.array]:
        own = [self._hidden_norm, self._norm, *self._fc.arrays(), *self._context_kv.arrays()]
        for layer in self._layers:
            own += [layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm]
            for part in (layer.qkv, layer.out, layer.gate_up, layer.down):
                own += part.arrays()
            for conv in (layer.attention_conv, layer.mlp_conv):
                own += [] if conv is None else conv.arrays()
        if self.selector is not None:
            own += self.selector.arrays()
        return own if self._ids is None else [*own, self._ids]


def _around(conv: Convolution | None, x: mx.array, sublayer: Rows) -> mx.array:
    return sublayer(x) if conv is None else conv.around(x, sublayer)


def _feed_forward(layer: _Layer, x: mx.array) -> mx.array:
    gate, up = mx.split(layer.gate_up(x), 2, axis=-1)
    return layer.down(gate * mx.sigmoid(gate) * up)


def _layer(
    weights: Mapping[str, mx.array], index: int, config: DraftConfig, bits: int | None
) -> _Layer:
    def get(*names: str) -> Linear:
        biased = config.attention_bias and names[0].startswith("self_attn")
        return linear(
            [weights[f"layers.{index}.{name}.weight"] for name in names],
            [weights[f"layers.{index}.{name}.bias"] for name in names] if biased else (),
            bits,
        )

    def norm(name: str) -> mx.array:
        return weights[f"layers.{index}.{name}.weight"]

    def conv(name: str) -> Convolution | None:
        numbers = config.convolutions
        return None if numbers is None else Convolution(weights, f"layers.{index}.{name}", numbers)

    return _Layer(
        input_norm=norm("input_layernorm"),
        qkv=get("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=norm("self_attn.q_norm"),
        k_norm=norm("self_attn.k_norm"),
        out=get("self_attn.o_proj"),
        post_norm=norm("post_attention_layernorm"),
        gate_up=get("mlp.gate_proj", "mlp.up_proj"),
        down=get("mlp.down_proj"),
        attention_conv=conv("attention_conv"),
        mlp_conv=conv("mlp_conv"),
    )


def _context_kv(weights: Mapping[str, mx.array], config: DraftConfig, bits: int | None) -> Linear:
    """K and V of every layer as one product: all layers read the same context states."""
    names = [f"layers.{i}.self_attn.{p}_proj" for i in range(config.layers) for p in "kv"]
    return linear(
        [weights[f"{name}.weight"] for name in names],
        [weights[f"{name}.bias"] for name in names] if config.attention_bias else (),
        bits,
    )
