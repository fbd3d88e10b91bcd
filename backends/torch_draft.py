"""The DFlash draft: context K/V from tapped target states, a block of ids from one pass.

Formulas, names and tensor layout follow the published reference; what version 2 adds lies in
``torch_draft2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from dflash_local.draft_config import DraftConfig

from .torch_advice import Asked, join
from .torch_attention import folded_attention
from .torch_draft2 import Convolution, Selector
from .torch_draft_context import ContextShape, DraftContext, SlicedContext
from .torch_linear import Linear, LinearMaker, dense, tensor_bytes
from .torch_probs import Lattice
from .torch_rope import RopeTable, rotate
from .torch_tree import independent

Embed = Callable[[torch.Tensor], torch.Tensor]
Head = Callable[[torch.Tensor], torch.Tensor]
Sublayer = Callable[[torch.Tensor], torch.Tensor]


class ContextMaker(Protocol):
    """Makes the cache of a draft's context."""

    def __call__(
        self, shape: ContextShape, *, dtype: torch.dtype, device: torch.device
    ) -> DraftContext:
        """An empty one."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one draft layer; projections that read the same input are one matrix."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor
    """``[heads + kv_heads, head_dim]``, so that one call serves queries and keys."""
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    attention_conv: Convolution | None
    mlp_conv: Convolution | None

    @property
    def bytes(self) -> int:
        """Size of its weights."""
        own = [self.input_norm, self.qk_norm, self.post_norm]
        for conv in (self.attention_conv, self.mlp_conv):
            own += [] if conv is None else conv.tensors
        products = (self.qkv, self.out, self.gate_up, self.down)
        return tensor_bytes(*own) + sum(product.bytes for product in products)


class TorchDraft:
    """A draft bound to its target's embedding and head.

    Args:
        config: the draft's numbers.
        weights: the checkpoint's tensors under their published names, on one device.
        embed: the target's input embedding; the draft's own is used where the file has one.
        head: the target's output head; likewise.
        capacity: context positions to hold.
        maker: stores the products; what version 2 adds stays as it is.
        context: makes the cache of context K/V.
        head_rows: the head's rows ``[draft vocab, hidden]`` for a reduced vocabulary whose own
            head is not in the file; without them every id is scored.
        states: what a block's rows are computed in beside the products; as the weights by default.
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: Mapping[str, torch.Tensor],
        embed: Embed,
        head: Head,
        capacity: int,
        maker: LinearMaker = dense,
        context: ContextMaker = SlicedContext,
        head_rows: torch.Tensor | None = None,
        states: torch.dtype | None = None,
    ) -> None:
        self.config = config
        own_rows = weights.get("embed_tokens.weight")
        self._embed = embed if own_rows is None else (lambda ids: F.embedding(ids, own_rows))
        own_head = weights.get("lm_head.weight", head_rows)
        self._own_head = None if own_head is None else maker("draft.head", own_head)
        self._head = self._own_head or head
        offsets = None if own_head is None else weights.get("d2t")
        del own_head, head_rows
        self._ids = self._columns = None
        """The target's ids of a reduced vocabulary, and the other way round; None where there is
        only one vocabulary. What the draft cannot say has one more column together."""
        if offsets is not None:
            assert config.vocab_size is not None
            self._ids = torch.arange(len(offsets), device=offsets.device) + offsets
            self._columns = torch.full((config.vocab_size,), len(offsets), device=offsets.device)
            self._columns[self._ids] = torch.arange(len(offsets), device=offsets.device)
        self.selector = None if config.v2 is None else Selector(weights, config.v2)
        """Chooses a path through the slots' best ids; None where slots are independent."""
        self._extra = [t for t in (own_rows, self._ids, self._columns) if t is not None]
        fc = weights["fc.weight"]
        self.device, self.dtype = fc.device, fc.dtype
        self._states = states or fc.dtype
        self._fc = maker("draft.fc", fc)
        del fc
        self._hidden_norm = weights["hidden_norm.weight"]
        self._norm = weights["norm.weight"]
        # Every layer reads the same context states, so one product serves all their K and V.
        self._context_kv = _context_kv(weights, config, maker)
        self._layers = [_layer(weights, i, config, maker) for i in range(config.layers)]
        self._k_norms = torch.stack([layer.qk_norm[-1:] for layer in self._layers])[None]
        self._rope = RopeTable(
            torch.tensor(config.rope.inverse_frequencies(config.head_dim)),
            config.rope.attention_factor,
            capacity + config.block_size,
            dtype=self.dtype,
            device=self.device,
        )
        self.context = context(self._context_shape(capacity), dtype=self.dtype, device=self.device)

    @property
    def bytes(self) -> int:
        """Size of the weights."""
        own = [self._hidden_norm, self._norm, *self._extra]
        own += [] if self.selector is None else self.selector.tensors
        products = self._fc.bytes + self._context_kv.bytes
        products += 0 if self._own_head is None else self._own_head.bytes
        return products + sum(layer.bytes for layer in self._layers) + tensor_bytes(*own)

    def append(self, features: torch.Tensor) -> None:
        """Project tapped states ``[rows, taps * target hidden]`` into the context K/V."""
        self.project(features)
        self.context.advance(features.shape[0])

    def project(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same without counting the rows in, on the device alone; there is no result."""
        config, rows = self.config, features.shape[0]
        self.context.begin(rows)
        context = self._rms(self._fc(features.to(self.dtype)), self._hidden_norm)
        kv = self._context_kv(context)
        kv = kv.view(rows, config.layers, 2, config.kv_heads, config.head_dim)
        keys = self._rms(kv[:, :, 0], self._k_norms)
        cos, sin = self._rotation()
        self.context.write(rotate(keys, cos[:, None], sin[:, None]), kv[:, :, 1])
        return ()

    def hidden(self, block: torch.Tensor) -> torch.Tensor:
        """States ``[rows, hidden]`` after the final norm for block ids that follow the context."""
        self.context.begin(block.shape[0])
        cos, sin = self._rotation()
        kinds = list(zip(self.config.windows, self.config.causal, strict=True))
        masks = {
            (window, causal): self.context.mask(window, causal=causal)
            for window, causal in set(kinds)
        }
        states = self._embed(block).to(self._states)
        if self.config.input_embedding_scale != 1.0:
            states = states * self.config.input_embedding_scale
        for index, layer in enumerate(self._layers):
            attend = partial(self._attend, index, layer, cos, sin, masks[kinds[index]])
            normed = self._rms(states, layer.input_norm)
            states = states + _around(layer.attention_conv, normed, attend)
            normed = self._rms(states, layer.post_norm)
            states = states + _around(layer.mlp_conv, normed, partial(_feed_forward, layer))
        return self._rms(states, self._norm)

    def slots(self, anchor: torch.Tensor, count: int) -> torch.Tensor:
        """States ``[count, hidden]`` of the slots behind ``anchor``, an id of shape ``[1]``."""
        block = torch.full((count + 1,), self.config.mask_token_id, device=self.device)
        block[:1] = anchor
        return self.hidden(block)[1:]

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        """Scores ``[count, draft vocab]`` of slots, from their states."""
        config, scores = self.config, self._head(states)
        if config.output_multiplier != 1.0:
            scores = scores * config.output_multiplier
        if config.final_logit_softcapping is not None:
            scores = scores.float() / config.final_logit_softcapping
            scores = config.final_logit_softcapping * torch.tanh(scores)
        return scores

    def spread(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores over the target's ids, ``[count, vocab]``; what the draft cannot say is -inf."""
        if self._ids is None:
            return scores
        assert self.config.vocab_size is not None
        whole = scores.new_full((scores.shape[0], self.config.vocab_size), float("-inf"))
        return whole.index_copy_(1, self._ids, scores)

    def lattice(
        self, scores: torch.Tensor, states: torch.Tensor, width: int, asked: Asked
    ) -> Lattice:
        """The ``width`` likeliest ids of every slot, or as many as the selector takes, and the
        advised one. The advice may be an id that the draft cannot say."""
        selector = self.selector
        best = independent(scores, width if selector is None else selector.width)
        candidates, columns = best.candidates, asked.ids
        if self._ids is not None and self._columns is not None:
            candidates, columns = self._ids[candidates], self._columns[columns]
        columns, most = columns[:, None], scores.shape[-1] - 1
        advised = scores.gather(-1, columns.clamp(max=most)).float()
        top = scores.gather(-1, best.candidates[:, :1]).float()
        said = best.scores[:, 0, :1] + (advised - top)
        said = said.masked_fill(columns > most, float("-inf"))
        link = None if selector is None else partial(selector.steps, states, asked.anchor)
        return join(Lattice(candidates, best.scores), said, asked, link)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        normed: torch.Tensor,
    ) -> torch.Tensor:
        config, rows = self.config, normed.shape[0]
        heads = layer.qkv(normed).view(rows, -1, config.head_dim)
        both, value = torch.split(heads, [config.heads + config.kv_heads, config.kv_heads], dim=1)
        both = rotate(self._rms(both, layer.qk_norm), cos, sin)
        query, key = torch.split(both, [config.heads, config.kv_heads], dim=1)
        keys, values = self.context.peek(index, key, value)
        query = query.transpose(0, 1)[None].to(keys.dtype)
        out = folded_attention(query, keys, values, mask, config.head_dim**-0.5)
        return layer.out(out.reshape(rows, -1).to(normed.dtype))

    def _context_shape(self, capacity: int) -> ContextShape:
        config = self.config
        return ContextShape(
            windows=config.windows,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block=config.block_size,
            capacity=capacity,
        )

    def _rms(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last axis, statistics in fp32; ``weight`` may carry leading axes."""
        normed = F.rms_norm(states, states.shape[-1:], eps=self.config.rms_norm_eps)
        return normed * weight

    def _rotation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine ``[rows, 1, head_dim]`` of the rows begun."""
        return self.context.take(self._rope.cos), self.context.take(self._rope.sin)


def _around(conv: Convolution | None, normed: torch.Tensor, sublayer: Sublayer) -> torch.Tensor:
    return sublayer(normed) if conv is None else conv.around(normed, sublayer)


def _feed_forward(layer: _Layer, normed: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up(normed).chunk(2, dim=-1)
    return layer.down(F.silu(gate).mul_(up))


def _layer(
    weights: Mapping[str, torch.Tensor], index: int, config: DraftConfig, maker: LinearMaker
) -> _Layer:
    place = f"layers.{index}."

    def norm(name: str) -> torch.Tensor:
        return weights[f"{place}{name}.weight"]

    def product(name: str, *parts: str, bias: bool = False) -> Linear:
        weight, added = _joined(weights, [place + part for part in parts], bias)
        return maker(f"draft.{index}.{name}", weight, added)

    def conv(name: str) -> Convolution | None:
        numbers = config.convolutions
        return None if numbers is None else Convolution(weights, place + name, numbers)

    heads = tuple(f"self_attn.{name}_proj" for name in "qkv")
    counts = (("q", config.heads), ("k", config.kv_heads))
    qk_norm = torch.cat([norm(f"self_attn.{n}_norm").expand(count, -1) for n, count in counts])
    return _Layer(
        input_norm=norm("input_layernorm"),
        qkv=product("qkv", *heads, bias=config.attention_bias),
        qk_norm=qk_norm,
        out=product("out", "self_attn.o_proj", bias=config.attention_bias),
        post_norm=norm("post_attention_layernorm"),
        gate_up=product("gate_up", "mlp.gate_proj", "mlp.up_proj"),
        down=product("down", "mlp.down_proj"),
        attention_conv=conv("attention_conv"),
        mlp_conv=conv("mlp_conv"),
    )


def _context_kv(
    weights: Mapping[str, torch.Tensor], config: DraftConfig, maker: LinearMaker
) -> Linear:
    """K and V of all layers for context states, ``[layers * 2 * kv_heads * head_dim]`` outputs."""
    parts = [f"layers.{i}.self_attn.{n}_proj" for i in range(config.layers) for n in "kv"]
    weight, bias = _joined(weights, parts, config.attention_bias)
    return maker("draft.context", weight, bias)


def _joined(
    weights: Mapping[str, torch.Tensor], names: list[str], bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights, and biases where there are any, of products that read the same input."""
    weight = torch.cat([weights[f"{name}.weight"] for name in names])
    return weight, torch.cat([weights[f"{name}.bias"] for name in names]) if bias else None
