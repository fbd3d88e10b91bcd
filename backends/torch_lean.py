"""A forward of our own for the plain decoder families: few operators, merged projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .torch_attention import folded_attention
from .torch_cache import TargetCache
from .torch_embedding import Embedding
from .torch_linear import Linear, tensor_bytes
from .torch_rope import RopeTable, rotate
from .torch_target import TargetShape
from .torch_tree import Tree


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """Weights of one layer; projections that read the same input are one product."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def bytes(self) -> int:
        """Size of its weights."""
        norms = (self.input_norm, self.q_norm, self.k_norm, self.post_norm)
        products = (self.qkv, self.out, self.gate_up, self.down)
        return tensor_bytes(*norms) + sum(product.bytes for product in products)


@dataclass(frozen=True, slots=True)
class LeanWeights:
    """Weights of a whole target."""

    embedding: Embedding
    layers: Sequence[LeanLayer]
    norm: torch.Tensor
    head: Linear
    tied: bool
    """Whether the head is the embedding matrix itself and takes no room of its own."""
    eps: float
    """Added to the mean square in every RMSNorm."""


class LeanTarget:
    """The contract of ``Target`` for Llama, Mistral, Qwen2 and Qwen3.

    Args:
        weights: its weights.
        shape: its numbers.
        taps: layers whose output is kept, in the order of concatenation.
        cache: K/V for every layer.
        rope: the rotation of every position that the cache holds.
    """

    def __init__(
        self,
        weights: LeanWeights,
        shape: TargetShape,
        taps: tuple[int, ...],
        cache: TargetCache,
        rope: RopeTable,
    ) -> None:
        self.shape = shape
        self.cache = cache
        self.device, self.dtype = weights.norm.device, weights.norm.dtype
        self._weights = weights
        self._taps = taps
        self._rope = rope
        self._states: dict[int, torch.Tensor] = {}

    def forward(self, ids: torch.Tensor, tree: Tree | None = None) -> torch.Tensor:
        """Final states ``[rows, hidden]`` of ids that follow the cache; K/V rows are written."""
        weights, cache, eps = self._weights, self.cache, self._weights.eps
        cache.begin(ids.shape[0], tree)
        cos, sin = cache.take(self._rope.cos), cache.take(self._rope.sin)
        masks = {key: cache.mask(*key) for key in {(s.window, s.groups) for s in self.shape.layers}}
        width = (self.shape.hidden_size,)
        states = weights.embedding(ids)
        for index, layer in enumerate(weights.layers):
            numbers = self.shape.layers[index]
            normed = F.rms_norm(states, width, layer.input_norm, eps)
            mask = masks[numbers.window, numbers.groups]
            states = states + self._attend(index, layer, normed, cos, sin, mask)
            normed = F.rms_norm(states, width, layer.post_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            states = states + layer.down(F.silu(gate).mul_(up))
            if index in self._taps:
                self._states[index] = states
        return F.rms_norm(states, width, weights.norm, eps)

    def _attend(
        self,
        index: int,
        layer: LeanLayer,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        numbers, rows = self.shape.layers[index], normed.shape[0]
        queries, dim = numbers.heads, numbers.head_dim
        heads = layer.qkv(normed).view(rows, -1, dim)
        rotated, value = torch.split(heads, [queries + numbers.kv_heads, numbers.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = torch.split(rotated, [queries, numbers.kv_heads], dim=1)
            eps = self._weights.eps
            query = F.rms_norm(query, (dim,), layer.q_norm, eps)
            key = F.rms_norm(key, (dim,), layer.k_norm, eps)
            rotated = torch.cat((query, key), dim=1)
        query, key = torch.split(rotate(rotated, cos, sin), [queries, numbers.kv_heads], dim=1)
        keys, values = self.cache.update(
            key.transpose(0, 1)[None], value.transpose(0, 1)[None], index
        )
        out = folded_attention(query.transpose(0, 1)[None], keys, values, mask, dim**-0.5)
        return layer.out(out.reshape(rows, -1))

    def features(self) -> torch.Tensor:
        """Tapped states of the last forward, ``[rows, taps * hidden]``; may be asked once."""
        states = torch.cat([self._states[layer] for layer in self._taps], dim=-1)
        self._states.clear()
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The output head on final states, ``[rows, vocab]``."""
        return self._weights.head(states)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The input embedding, ``[rows, hidden]``."""
        return self._weights.embedding(ids)

    def bytes(self) -> int:
        """Size of the weights."""
        weights = self._weights
        head = 0 if weights.tied else weights.head.bytes
        own = weights.embedding.bytes + tensor_bytes(weights.norm) + head
        return own + sum(layer.bytes for layer in weights.layers)

    def close(self) -> None:
        """Let go of the weights."""
        self._states.clear()
        del self._weights
