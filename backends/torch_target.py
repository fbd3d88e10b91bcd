"""The target: a transformers decoder, tapped by hooks, over our own K/V cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .torch_attention import additive_mask
from .torch_cache import KVCache, visible_rows


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The numbers of a target that caches and drafts depend on."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    embedding_rows: int
    windows: tuple[int | None, ...]
    """Per layer, the rows that a query sees, itself included; None is all."""


class TorchTarget:
    """Runs rows of ids through the target and keeps their tapped states.

    Args:
        model: a causal language model of transformers, in eval mode.
        shape: its numbers.
        taps: layers whose output is kept, in the order of concatenation.
        capacity: positions that the cache holds.
    """

    def __init__(
        self, model: Any, shape: TargetShape, taps: tuple[int, ...], capacity: int
    ) -> None:
        self.shape = shape
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._embedding = model.get_input_embeddings()
        weight = self._embedding.weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.cache = KVCache(
            shape.windows,
            shape.kv_heads,
            shape.head_dim,
            capacity,
            dtype=self.dtype,
            device=self.device,
        )
        self._groups = shape.heads // shape.kv_heads
        self._taps = taps
        self._states: dict[int, torch.Tensor] = {}
        self._hooks = [
            self._decoder.layers[layer].register_forward_hook(self._keeper(layer))
            for layer in set(taps)
        ]
        self._model = model

    def _keeper(self, layer: int) -> Any:
        def keep(module: object, inputs: object, output: Any) -> None:
            self._states[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Final states ``[rows, hidden]`` of ids that follow the cache; K/V rows are written.

        The rows count only after ``cache.advance``.
        """
        rows, start = ids.shape[0], self.cache.length
        positions = torch.arange(start, start + rows, device=self.device)
        output = self._decoder(
            input_ids=ids[None],
            attention_mask=self._masks(start, rows),
            position_ids=positions[None],
            cache=self.cache,
            use_cache=True,
        )
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def features(self) -> torch.Tensor:
        """Tapped states of the last forward, ``[rows, taps * hidden]``; may be asked once."""
        states = torch.cat([self._states[layer][0] for layer in self._taps], dim=-1)
        self._states.clear()
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The output head on final states, ``[rows, vocab]``."""
        logits: torch.Tensor = self._head(states)
        return logits[..., : self.shape.vocab_size]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The input embedding, ``[rows, hidden]``."""
        rows: torch.Tensor = self._embedding(ids)
        return rows

    def _masks(self, start: int, rows: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """One additive mask per kind of layer, in the form that the decoder passes on as is."""
        kinds = set(self.shape.windows)
        masks = {window: self._mask(start, rows, window) for window in kinds}
        if len(kinds) == 1:
            return masks[next(iter(kinds))]
        return {
            "full_attention" if window is None else "sliding_attention": mask
            for window, mask in masks.items()
        }

    def _mask(self, start: int, rows: int, window: int | None) -> torch.Tensor:
        visible = visible_rows(start, rows, window, self.device)
        return additive_mask(visible, self._groups, self.dtype)[None, None]

    def bytes(self) -> int:
        """Size of the weights."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def close(self) -> None:
        """Let go of hooks and weights."""
        for hook in self._hooks:
            hook.remove()
        del self._model, self._decoder, self._head, self._embedding
