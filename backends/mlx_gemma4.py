"""The layers of Gemma 4, whose later ones read the K/V of earlier ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from .mlx_cache import FullCache, LayerCache, WindowCache


def gemma4_layers(
    trunk: Any,
    ids: mx.array,
    x: mx.array,
    caches: Sequence[LayerCache],
    masks: Mapping[type[Any], mx.array | str | None],
) -> Iterator[mx.array]:
    """Each layer's output in turn.

    Args:
        trunk: the library's text model.
        ids: ``[1, rows]``.
        x: the scaled embedding of the ids.
        caches: one per layer that has K/V of its own.
        masks: by kind of cache.
    """
    extras = _layer_inputs(trunk, ids, x)
    shared: list[tuple[Any, Any]] = []
    for index, layer in enumerate(trunk.layers):
        kind = FullCache if layer.layer_type == "full_attention" else WindowCache
        cache = caches[index] if index < len(caches) else None
        kv, offset = (None, None) if cache is not None else shared[trunk.previous_kvs[index]]
        x, kv, offset = layer(
            x, masks[kind], cache, per_layer_input=extras[index], shared_kv=kv, offset=offset
        )
        shared.append((kv, offset))
        yield x


def _layer_inputs(trunk: Any, ids: mx.array, x: mx.array) -> Sequence[mx.array | None]:
    """The small models' own embedding per layer; None in the others."""
    depth = len(trunk.layers)
    if not trunk.hidden_size_per_layer_input:
        return [None] * depth
    extras = trunk._project_per_layer_inputs(x, trunk._get_per_layer_inputs(ids))
    return [extras[:, :, index] for index in range(depth)]
