"""The target over a transformers decoder, tapped by hooks, with our own K/V cache."""

from __future__ import annotations

from typing import Any

import torch

from .torch_cache import SlicedCache
from .torch_hf_load import ProductModule
from .torch_linear import tensor_bytes
from .torch_target import TargetShape
from .torch_tree import Tree


class TransformersTarget:
    """The contract of ``Target`` for families without a lean forward.

    Args:
        model: a causal language model of transformers, in eval mode.
        shape: its numbers.
        taps: layers whose output is kept, in the order of concatenation.
        cache: what it remembers.
        capacity: positions that the cache holds.
    """

    def __init__(
        self,
        model: Any,
        shape: TargetShape,
        taps: tuple[int, ...],
        cache: SlicedCache,
        capacity: int,
    ) -> None:
        self.shape = shape
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._embedding = model.get_input_embeddings()
        weight = self._embedding.weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.cache = cache
        self._positions = torch.arange(capacity, device=self.device)
        self._taps = taps
        self._states: dict[int, torch.Tensor] = {}
        self._hooks = [
            self._decoder.layers[layer].register_forward_hook(self._keeper(layer))
            for layer in set(taps)
        ]
        for layer, numbers in enumerate(shape.layers):
            if numbers.kind == "linear_attention" and cache.recurrent is not None:
                module = self._decoder.layers[layer].linear_attn
                self._hooks.append(cache.recurrent.attach(layer, module))
        self._softcap: float | None = getattr(
            model.config.get_text_config(), "final_logit_softcapping", None
        )
        self._model = model

    def _keeper(self, layer: int) -> Any:
        def keep(module: object, inputs: object, output: Any) -> None:
            self._states[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    def forward(self, ids: torch.Tensor, tree: Tree | None = None) -> torch.Tensor:
        """Final states ``[rows, hidden]`` of ids that follow the cache; K/V rows are written.

        The rows count only after ``cache.advance``.
        """
        self.cache.begin(ids.shape[0], tree)
        output = self._decoder(
            input_ids=ids[None],
            attention_mask=self._masks(),
            position_ids=self.cache.take(self._positions)[None],
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
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits[..., : self.shape.vocab_size]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The input embedding, ``[rows, hidden]``."""
        rows: torch.Tensor = self._embedding(ids)
        return rows

    def _masks(self) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """One additive mask per kind of layer, in the form that the decoder passes on as is."""
        kinds = {layer.kind: layer for layer in self.shape.layers}
        masks = {
            kind: None if mask is None or kind == "linear_attention" else mask[None, None]
            for kind, layer in kinds.items()
            for mask in [self.cache.mask(layer.window, layer.groups)]
        }
        if len(kinds) > 1:
            return masks
        (mask,) = masks.values()
        if mask is None:
            # Decoders with one kind of layer make a mask of their own where they get none.
            (layer,) = kinds.values()
            columns = self.cache.columns(layer.window)
            mask = torch.zeros(1, 1, layer.groups, columns, dtype=self.dtype, device=self.device)
        return mask

    def bytes(self) -> int:
        """Size of the weights."""
        own = tensor_bytes(*self._model.parameters(), *self._model.buffers())
        products = [m.product for m in self._model.modules() if isinstance(m, ProductModule)]
        return own + sum(product.bytes for product in products)

    def close(self) -> None:
        """Let go of hooks and weights."""
        for hook in self._hooks:
            hook.remove()
        del self._model, self._decoder, self._head, self._embedding
