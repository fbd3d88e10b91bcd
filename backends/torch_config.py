"""What a target's config says: its family, its numbers, its stop ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_local.errors import BackendUnavailable, WeightsError
from dflash_local.weights import folder_shapes, read_json, refuse_own_code

from .torch_families import FAMILIES, THROUGH_TRANSFORMERS
from .torch_target import LayerShape, TargetShape

_ROPE_NAMES = ("default", "mrope", "su")
"""Kinds that have no function of their own: the library reads them as others."""


def target_config(folder: Path) -> Any:
    """transformers' config of a checkpoint whose files are all there.

    Raises:
        WeightsError: files are missing or damaged, or want to run code of their own.
        BackendUnavailable: nothing here runs this family.
    """
    raw = read_json(folder / "config.json")
    refuse_own_code(raw, folder)
    family = raw.get("model_type")
    known = (*FAMILIES, *THROUGH_TRANSFORMERS)
    if family not in known:
        raise BackendUnavailable(
            f"The torch backend does not run {family!r} models yet.",
            f"It runs {', '.join(known)}.",
        )
    folder_shapes(folder)
    _check_rope(raw.get("text_config") or raw, folder)
    try:
        whole = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return whole.get_text_config(decoder=True)
    except Exception as error:
        raise WeightsError(f"{folder}/config.json is not usable: {error}") from error


def _check_rope(text: Mapping[str, Any], folder: Path) -> None:
    """Refuse rotary embeddings that the library does not know; layers may each name their own."""
    named = text.get("rope_parameters") or text.get("rope_scaling") or {}
    parts = (named, *named.values()) if isinstance(named, dict) else ()
    for part in parts:
        kind = (part.get("rope_type") or part.get("type")) if isinstance(part, dict) else None
        if kind not in (None, *_ROPE_NAMES, *ROPE_INIT_FUNCTIONS):
            raise WeightsError(
                f"{folder}/config.json: rotary embedding {kind!r} is not supported.",
                f"Known are default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}.",
            )


def target_shape(config: Any) -> TargetShape:
    """The numbers of a target, from the config of its text part."""
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        _positive(name, getattr(config, name))
    count, vocab = int(config.num_hidden_layers), int(config.vocab_size)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * count
    # Gemma 4: full layers have heads of another size, the last layers read K/V of earlier ones.
    each = getattr(config, "per_layer_config", None) or [config] * count
    lean = config.model_type in FAMILIES
    if lean and (others := set(kinds) - {"full_attention", "sliding_attention"}):
        raise WeightsError(f"{config.model_type} models have no layers of {sorted(others)[0]!r}.")
    own = count if lean else count - (getattr(config, "num_kv_shared_layers", None) or 0)
    return TargetShape(
        hidden_size=int(config.hidden_size),
        layers=tuple(
            _layer_shape(
                each[index], kind, window, stored=index < own and kind != "linear_attention"
            )
            for index, kind in enumerate(kinds[:count])
        ),
        vocab_size=vocab,
        embedding_rows=vocab,
    )


def _layer_shape(config: Any, kind: str, window: int | None, *, stored: bool) -> LayerShape:
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    _positive("num_attention_heads", heads)
    _positive("num_key_value_heads", kv_heads)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    _positive("head_dim", dim)
    return LayerShape(
        kind=kind,
        window=window if kind == "sliding_attention" else None,
        heads=heads,
        kv_heads=int(kv_heads),
        head_dim=int(dim),
        stored=stored,
    )


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise WeightsError(f"The target's {name} is {value}.", "Pull the model again.")
