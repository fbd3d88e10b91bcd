"""The sizes of a target that its memory depends on, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_local.pairs import Shape

LEAN = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` that run through a forward of our own on torch."""
DEFAULT_LIMIT = 8192
"""Positions where a config does not say."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json describes; what it leaves out counts as 0."""
    text = text_config(config)
    heads = _number(text, "num_attention_heads") or 1
    hidden = _number(text, "hidden_size")
    kv_heads = _number(text, "num_key_value_heads") or heads
    dim = _number(text, "head_dim") or hidden // heads
    kinds = _layer_kinds(text)
    window = _number(text, "sliding_window") or _number(text, "max_position_embeddings")
    sliding = kinds.count("sliding_attention")
    full = _full_layer(text, kinds)
    return Shape(
        hidden=hidden,
        kv_layers=len(kinds) - sliding - kinds.count("linear_attention"),
        kv_heads=_number(full, "num_global_key_value_heads")
        or _number(full, "num_key_value_heads")
        or kv_heads,
        head_dim=_number(full, "global_head_dim") or _number(full, "head_dim") or dim,
        heads=heads,
        inner=_inner(text, hidden),
        vocab=_number(text, "vocab_size"),
        window=window if sliding else 0,
        window_layers=sliding,
        window_kv_heads=kv_heads if sliding else 0,
        window_head_dim=dim if sliding else 0,
        recurrent_bytes=kinds.count("linear_attention") * _recurrent_state(text),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def is_lean(config: Mapping[str, Any]) -> bool:
    """Whether the target is of a family that has a forward of our own on torch."""
    return text_config(config).get("model_type") in LEAN


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output head is the embedding."""
    text = text_config(config)
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings")))


def limit_of(config: Mapping[str, Any]) -> int:
    """Positions that the target was made for."""
    return _number(text_config(config), "max_position_embeddings") or DEFAULT_LIMIT


def _full_layer(text: Mapping[str, Any], kinds: list[str]) -> Mapping[str, Any]:
    """What a config says of its layers that see everything: some list numbers layer by layer."""
    each = text.get("per_layer_config")
    if isinstance(each, dict):
        for index, kind in enumerate(kinds):
            own = each.get(str(index))
            if kind == "full_attention" and isinstance(own, dict):
                return {**text, **own}
    return text


def _layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """The kind of every layer that keeps something of its own."""
    count = _number(text, "num_hidden_layers")
    own = count - _number(text, "num_kv_shared_layers")
    listed = text.get("layer_types")
    if isinstance(listed, list):
        return [str(kind) for kind in listed[:own]]
    if every := _number(text, "full_attention_interval"):
        other = "linear_attention"
    elif every := _number(text, "sliding_window_pattern"):
        other = "sliding_attention"
    else:
        slides = text.get("sliding_window") and text.get("use_sliding_window", True)
        return ["sliding_attention" if slides else "full_attention"] * own
    return [other if (index + 1) % every else "full_attention" for index in range(own)]


def _inner(text: Mapping[str, Any], hidden: int) -> int:
    """Numbers per row in the middle of the feed-forward part; with experts, of all that it asks,
    whose outputs are there together before they are added up."""
    dense = _number(text, "intermediate_size")
    asked = _number(text, "num_experts_per_tok") or _number(text, "top_k_experts")
    if not asked:
        return dense or 4 * hidden
    each = _number(text, "moe_intermediate_size") or _number(text, "expert_intermediate_size")
    beside = _number(text, "shared_expert_intermediate_size")
    return asked * ((each or dense) + hidden) + (beside or (dense if each else 0))


def _recurrent_state(text: Mapping[str, Any]) -> int:
    """Bytes of one gated-delta layer's state in fp32."""
    heads = _number(text, "linear_num_value_heads")
    key, value = (_number(text, f"linear_{part}_head_dim") for part in ("key", "value"))
    return heads * key * value * 4


def _number(text: Mapping[str, Any], key: str) -> int:
    """A whole number of a config; 0 where there is none."""
    value = text.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
