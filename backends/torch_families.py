"""The decoder families that the lean forward knows; one entry each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _never(config: Any) -> bool:
    return False


def _attention_bias(config: Any) -> bool:
    return bool(getattr(config, "attention_bias", False))


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family's layer differs from the common one; each flag is read from its config."""

    qkv_bias: Callable[[Any], bool] = _never
    out_bias: Callable[[Any], bool] = _never
    mlp_bias: Callable[[Any], bool] = _never
    head_norms: bool = False
    """RMSNorm on every query and key head, before the rotation."""


FAMILIES: dict[str, Family] = {
    "llama": Family(
        qkv_bias=_attention_bias,
        out_bias=_attention_bias,
        mlp_bias=lambda config: bool(getattr(config, "mlp_bias", False)),
    ),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=lambda config: True),
    "qwen3": Family(qkv_bias=_attention_bias, out_bias=_attention_bias, head_norms=True),
}

THROUGH_TRANSFORMERS = (
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gpt_oss",
)
"""Values of ``model_type`` that run through transformers' own forward, covered by tests."""

ROPES = ("default", "linear", "llama3", "yarn")
"""Rotations whose angles do not depend on the length of the text."""


def rope_kind(config: Any) -> str:
    """The kind of rotary embedding that a config of transformers names."""
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def lean_family(config: Any) -> Family | None:
    """The entry for a config of transformers; None where the lean forward does not apply."""
    family = FAMILIES.get(config.model_type)
    if family is None or config.hidden_act != "silu" or rope_kind(config) not in ROPES:
        return None
    return family
