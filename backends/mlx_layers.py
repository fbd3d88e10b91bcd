"""A target whose layers are run here, one by one, over our own caches.

Running the layers ourselves gives the tapped states without touching any library class, and every
layer its mask from its own cache. The model types that this is right for are written down here, as
the forward of another may hold more than a stack of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_local.branches import in_place
from dflash_local.errors import WeightsError

from .mlx_cache import FullCache, LayerCache, WindowCache
from .mlx_delta import DeltaCache, delta_layer, is_delta
from .mlx_gemma4 import gemma4_layers
from .mlx_history import History
from .mlx_target import Pass
from .mlx_tree import Tree
from .mlx_tree_rows import TreeRows, take_trees

_STACKS = {
    "gpt_oss",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
}
_GEMMA3 = {"gemma3", "gemma3_text"}
_GEMMA4 = {"gemma4", "gemma4_text", "gemma4_unified"}


class LayeredTarget:
    """Runs ids through the layers of a known architecture.

    Args:
        model: a language model of mlx-lm, evaluated.
        config: its ``config.json``.
        taps: layers whose output is kept, in the order of concatenation.
        kv_bits: 8 keeps K/V in 8 bits.
    """

    def __init__(
        self,
        model: Any,
        config: Mapping[str, Any],
        taps: Sequence[int] = (),
        kv_bits: int | None = None,
    ) -> None:
        self.model_type = str(config.get("model_type"))
        assert known(config), self.model_type
        text = model.language_model if "language_model" in model else model
        text_config = config.get("text_config") or config
        self._text, self._trunk = text, text.model
        self._layers = list(text.model.layers)
        self._taps = tuple(taps)
        self._packs = kv_bits == 8
        self._model = model
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self._windows = _windows(model, self._layers, text_config, self.model_type)
        self.hidden_size: int = text.args.hidden_size
        self.vocab_size: int = text.args.vocab_size
        embedding = self._trunk.embed_tokens.weight
        self.embedding_rows: int = embedding.shape[0]
        self.history = History(self._make_caches)
        self._tree: list[TreeRows] = []
        """The layers' caches under the last tree."""
        self.branching = self.model_type in _STACKS and self.history.trimmable
        if self.branching:
            take_trees(self._layers)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def forward(self, ids: mx.array, *, revocable: bool = False, tree: Tree | None = None) -> Pass:
        """Run ids ``[rows]``, a tree's or one behind the other, behind the caches.

        The rows count only after ``history.commit`` or ``history.advance``; to commit fewer than
        all of them they must be ``revocable``.
        """
        caches: Sequence[Any] = self.history.layers
        masks: dict[type[Any], mx.array | str | None] = {
            type(cache): cache.mask(ids.shape[0])
            for cache in caches
            if isinstance(cache, FullCache | WindowCache)
        }
        if tree is not None:
            past = mx.ones((tree.rows, self.history.position), dtype=mx.bool_)
            masks[TreeRows] = mx.concatenate([past, tree.sees], axis=-1)
            positions = self.history.position + tree.depths
            caches = self._tree = [TreeRows(cache, positions) for cache in caches]
        x = self.embed(ids)[None]
        if self.model_type in _GEMMA4:
            states = gemma4_layers(self._trunk, ids[None], x, caches, masks)
        else:
            states = self._stack(x, caches, masks, revocable)
        kept: dict[int, mx.array] = {}
        for index, x in enumerate(states):
            if index in self._taps:
                kept[index] = x[0]
        features = None
        if self._taps:
            features = mx.concatenate([kept[layer] for layer in self._taps], axis=-1)
        return Pass(self._trunk.norm(x)[0], features)

    def gather(self, rows: Sequence[int]) -> None:
        """Bring these rows of the last tree to the front of what it wrote."""
        first = in_place(rows)
        if first < len(rows):
            index = mx.array(list(rows[first:]), dtype=mx.int32)
            for layer in self._tree:
                layer.gather(first, index)
        self._tree = []

    def _stack(
        self,
        x: mx.array,
        caches: Sequence[Any],
        masks: Mapping[type[Any], mx.array | str | None],
        revocable: bool,
    ) -> Iterator[mx.array]:
        """Each layer's output in turn, one layer after the other."""
        for layer, cache in zip(self._layers, caches, strict=True):
            if isinstance(cache, DeltaCache):
                x = delta_layer(layer, x, cache, revocable=revocable)
            else:
                x = layer(x, masks[type(cache)], cache)
            yield x

    def embed(self, ids: mx.array) -> mx.array:
        """The input embedding as the first layer reads it, ``[rows, hidden]``."""
        x: mx.array = self._trunk.embed_tokens(ids)
        if self.model_type in _GEMMA3:
            # The library rounds the factor to bf16, as the model was trained with it.
            x = x * mx.array(self.hidden_size**0.5, mx.bfloat16).astype(x.dtype)
        elif self.model_type in _GEMMA4:
            x = x * self.hidden_size**0.5
        return x

    def head(self, hidden: mx.array) -> mx.array:
        """The bare output head, ``[rows, vocab]``: what a draft shares."""
        own = "lm_head" in self._text
        head = self._text.lm_head if own else self._trunk.embed_tokens.as_linear
        logits: mx.array = head(hidden.astype(self.dtype))
        return logits

    def head_of(self, ids: mx.array) -> Callable[[mx.array], mx.array]:
        """The same for some ids alone, ``[rows, ids]``; packed rows stay packed."""
        module: Any = self._text.lm_head if "lm_head" in self._text else self._trunk.embed_tokens
        weight = module.weight[ids]
        if "scales" not in module:
            return lambda hidden: hidden.astype(self.dtype) @ weight.T
        packed: dict[str, Any] = {"scales": module.scales[ids], "transpose": True}
        packed |= {name: getattr(module, name) for name in ("group_size", "bits", "mode")}
        if "biases" in module:
            packed["biases"] = module.biases[ids]
        return lambda hidden: mx.quantized_matmul(hidden.astype(self.dtype), weight, **packed)

    def logits(self, hidden: mx.array) -> mx.array:
        """The target's own scores, ``[rows, vocab]``."""
        logits = self.head(hidden)
        if self._softcap is None:
            return logits
        return mx.tanh(logits.astype(mx.float32) / self._softcap) * self._softcap

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the activations."""
        dtype: mx.Dtype = self._trunk.norm.weight.dtype
        return dtype

    @property
    def bytes(self) -> int:
        """Size of the weights."""
        return sum(a.nbytes for _, a in tree_flatten(self._model.parameters()))

    def _make_caches(self) -> list[LayerCache]:
        caches: list[LayerCache] = []
        for window in self._windows:
            if window == _DELTA:
                caches.append(DeltaCache())
            elif window is None:
                caches.append(FullCache(packs=self._packs))
            else:
                caches.append(WindowCache(window, packs=self._packs))
        return caches


_DELTA = -1
"""Marks a Gated DeltaNet layer among the windows."""


def known(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config can be run layer by layer."""
    return config.get("model_type") in _STACKS | _GEMMA3 | _GEMMA4


def _windows(
    model: Any, layers: Sequence[Any], config: Mapping[str, Any], model_type: str
) -> list[int | None]:
    """Per cached layer: None for all positions, a window, or the mark of a DeltaNet.

    Raises:
        WeightsError: a layer keeps something that cannot be rolled back.
    """
    if model_type == "mistral" and not config.get("layer_types"):
        # The first Mistral models slide in every layer, which the library leaves out.
        return [config.get("sliding_window")] * len(layers)
    if not hasattr(model, "make_cache"):
        return _configured_windows(config, len(layers), model_type)
    windows: list[int | None] = []
    for index, (cache, layer) in enumerate(zip(model.make_cache(), layers, strict=False)):
        name = type(cache).__name__
        if name == "KVCache":
            windows.append(None)
        elif name == "RotatingKVCache" and cache.keep == 0:
            windows.append(cache.max_size)
        elif name == "ArraysCache" and is_delta(layer):
            windows.append(_DELTA)
        else:
            raise WeightsError(
                f"Layer {index} of the target keeps a {name}, which cannot be rolled back "
                "after a refused draft.",
                "Load it without a draft.",
            )
    if len({w for w in windows if w not in (None, _DELTA)}) > 1:
        raise WeightsError("The target's sliding layers have windows of several sizes.")
    return windows


def _configured_windows(config: Mapping[str, Any], depth: int, model_type: str) -> list[int | None]:
    """Windows of the Qwen families, whose library classes leave sliding layers out."""
    if not config.get("use_sliding_window"):
        return [None] * depth
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers") or 0
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(depth)]
    if window is None or len(kinds) != depth or model_type == "qwen3_moe":
        raise WeightsError(
            f"The target's sliding layers are described in a way that {model_type} does not know."
        )
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]
