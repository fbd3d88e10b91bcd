"""A draft's config.json in any published layout, read into one validated value.

Layouts: Z Lab v1 and v2 (nested ``dflash_config``, flat keys as fallback) and ``speculators``
(``transformer_layer_config``). Field meanings and defaults follow the published reference
implementations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from dflash_local.errors import DraftMismatch, OptionError, WeightsError
from dflash_local.rope import RopeConfig

LayerKind = Literal["full", "sliding"]

DEFAULT_BLOCK = 16
DEFAULT_SPECULATORS_BLOCK = 8
DEFAULT_ROPE_THETA = 10000.0
_LARGEST = 2**31 - 1
"""No size of a model is larger, nor an index that libraries take."""

_MOST_LAYERS = 4096

_MOST_CANDIDATES = 512
"""Ids of a slot that a selector weighs against all of the slot before."""

_REFUSED = {
    "eagle": "an EAGLE draft",
    "dspark": "a DSpark draft",
    "domino": "a Domino draft",
    "laguna": "a Laguna draft",
    "medusa": "a Medusa draft",
    "mimo": "a MiMo draft with attention sinks",
}


@dataclass(frozen=True, slots=True)
class DFlash2Config:
    """The two parts that DFlash 2 adds: block convolutions and the candidate selector."""

    conv_kernel_size: int
    """0 where there is the selector alone."""
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Everything that building a draft needs."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int | None
    """None where the file leaves it to the target."""
    rms_norm_eps: float
    attention_bias: bool
    rope: RopeConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based target layers whose output is tapped, in the order of concatenation."""
    layer_kinds: tuple[LayerKind, ...]
    sliding_window: int | None
    """Rows that a sliding layer sees: the row itself and ``sliding_window - 1`` before it."""
    causal: tuple[bool, ...]
    """Per layer, whether a block row sees only itself and earlier rows."""
    target_hidden_size: int
    """Width of one tapped state: ``fc`` reads ``len(target_layer_ids) * target_hidden_size``."""
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    draft_vocab_size: int | None = None
    """Size of a reduced draft vocabulary with its own head and mapping; None is the target's."""
    v2: DFlash2Config | None = None
    window_limit: int | None = None
    """Most rows that any layer is allowed to see, as chosen at load; None leaves full attention."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the rows that a block row sees, itself included; None is all."""
        own = [self.sliding_window if kind == "sliding" else None for kind in self.layer_kinds]
        limit = self.window_limit
        return tuple(limit if w is None else w if limit is None else min(w, limit) for w in own)

    @property
    def context_window(self) -> int | None:
        """Context rows that any layer can still see; None when a layer has full attention."""
        bounded = [window for window in self.windows if window is not None]
        return max(bounded) - 1 if len(bounded) == self.layers else None

    @property
    def convolutions(self) -> DFlash2Config | None:
        """The numbers of the block convolutions; None where there are none."""
        return self.v2 if self.v2 is not None and self.v2.conv_kernel_size else None

    def limited(self, window: int | None) -> DraftConfig:
        """The same draft whose layers see at most ``window`` rows, itself included.

        Raises:
            OptionError: the window is smaller than a block.
        """
        if window is not None and window < self.block_size:
            raise OptionError(
                f"A draft window of {window} is smaller than the draft's block of "
                f"{self.block_size} rows.",
                f"Give {self.block_size} or more.",
            )
        return replace(self, window_limit=window)

    def check_target(self, *, hidden_size: int, layers: int, embedding_rows: int) -> None:
        """Compare with the target that the draft is to serve.

        Raises:
            DraftMismatch: hidden size, tapped layers or mask id do not fit.
        """
        choose = "Choose the draft that was trained for this target."
        if self.target_hidden_size != hidden_size:
            raise DraftMismatch(
                f"The draft reads states of size {self.target_hidden_size}, "
                f"the target's have {hidden_size}.",
                choose,
            )
        wrong = [layer for layer in self.target_layer_ids if not 0 <= layer < layers]
        if wrong:
            raise DraftMismatch(
                f"The draft taps target layer {wrong[0]}, the target has layers 0 to {layers - 1}.",
                choose,
            )
        if not 0 <= self.mask_token_id < embedding_rows:
            raise DraftMismatch(
                f"The draft's mask id {self.mask_token_id} lies beyond the target's embedding "
                f"of {embedding_rows} rows.",
                choose,
            )
        if self.vocab_size is not None and self.vocab_size > embedding_rows:
            raise DraftMismatch(
                f"The draft's vocabulary has {self.vocab_size} ids, the target's embedding "
                f"{embedding_rows} rows.",
                choose,
            )


def read_draft_config(folder: Path) -> DraftConfig:
    """The config of the draft in ``folder``.

    Raises:
        WeightsError: config.json is missing, is no JSON, or describes no DFlash draft.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"The draft folder {folder} has no config.json.", "Pull the draft again."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read: {error}.", "Pull the draft again.") from None
    if not isinstance(raw, dict):
        raise WeightsError(f"{path} holds no JSON object.", "Pull the draft again.")
    return parse_draft_config(cast(Mapping[str, Any], raw), str(path))


def parse_draft_config(raw: Mapping[str, Any], source: str = "config.json") -> DraftConfig:
    """The same from a parsed JSON object; ``source`` names it in errors."""
    try:
        return _parsed(raw, source)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise WeightsError(f"{source} is not usable: {error}.", "Pull the draft again.") from None


def _parsed(raw: Mapping[str, Any], source: str) -> DraftConfig:
    _refuse_others(raw, source)
    fields = _Fields(raw, source)
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    kinds, window = _layer_kinds(fields, layers)
    taps = _taps(fields, layers)
    softcap = fields.number("final_logit_softcapping", 0.0)
    draft_vocab = fields.get("draft_vocab_size")
    vocab = fields.get("vocab_size")
    config = DraftConfig(
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(1, heads)),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=None if vocab is None else int(vocab),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention_bias=bool(fields.get("attention_bias") or False),
        rope=_rope(fields),
        block_size=fields.integer(
            "block_size", DEFAULT_SPECULATORS_BLOCK if fields.speculators else DEFAULT_BLOCK
        ),
        mask_token_id=fields.integer("mask_token_id"),
        target_layer_ids=taps,
        layer_kinds=kinds,
        sliding_window=window,
        causal=_causal(fields, kinds),
        target_hidden_size=fields.integer("target_hidden_size", hidden),
        input_embedding_scale=fields.number("input_embedding_scale", 1.0),
        output_multiplier=fields.number("output_multiplier", 1.0),
        final_logit_softcapping=softcap if softcap > 0 else None,
        draft_vocab_size=None
        if draft_vocab is None or draft_vocab == vocab
        else int(cast(int, draft_vocab)),
        v2=_v2(fields),
    )
    _validate(config, fields)
    return config


class _Fields:
    """Looks a key up where the layouts keep it: nested first, then flat."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.raw = raw
        self.speculators = "speculators_model_type" in raw
        nested = raw.get("dflash_config") or {}
        layer = raw.get("transformer_layer_config") or {}
        if not isinstance(nested, Mapping) or not isinstance(layer, Mapping):
            raise WeightsError(f"{source}: a nested block is no object.", "Pull the draft again.")
        self._blocks: tuple[Mapping[str, Any], ...] = (nested, raw, layer)

    def get(self, key: str) -> Any:
        """The first value that is not null, or None."""
        return next((b[key] for b in self._blocks if b.get(key) is not None), None)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number, required unless a default is given."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise WeightsError(f"{self.source} lacks {key}.", "Is this a DFlash draft?")
        if isinstance(value, bool) or not isinstance(value, int):
            raise WeightsError(f"{self.source}: {key} is {value!r}, not a whole number.")
        return value

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightsError(f"{self.source}: {key} is {value!r}, not a number.")
        return float(value)


def _refuse_others(raw: Mapping[str, Any], source: str) -> None:
    """Name the kinds of draft that look alike and are not DFlash."""
    architectures = raw.get("architectures") or []
    names = [str(name) for name in architectures]
    names += [str(raw.get("speculators_model_type") or ""), str(raw.get("model_type") or "")]
    for name in names:
        for mark, kind in _REFUSED.items():
            if mark in name.lower():
                raise WeightsError(
                    f"{source} describes {kind} ({name}).", "Only DFlash drafts can be used."
                )
    nested = raw.get("dflash_config") or {}
    if isinstance(nested, Mapping) and nested.get("use_swa"):
        raise WeightsError(
            f"{source} describes a MiMo draft with attention sinks.",
            "Only DFlash drafts can be used.",
        )
    if any("DFlash" in name for name in names) or "dflash" in names or nested:
        return
    raise WeightsError(
        f"{source} describes no DFlash draft ({', '.join(n for n in names if n) or 'no kind'}).",
        "Give a folder with a DFlash draft.",
    )


def _rope(fields: _Fields) -> RopeConfig:
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise WeightsError(f"{fields.source}: rope_scaling is {scaling!r}, not an object.")
    theta = fields.get("rope_theta") or scaling.get("rope_theta") or DEFAULT_ROPE_THETA
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if fields.get("is_neox_style") is False or fields.get("rope_is_neox_style") is False:
        raise WeightsError(f"{fields.source}: interleaved rotary embedding is not supported.")
    if not 1.0 < float(theta) < math.inf:
        raise WeightsError(f"{fields.source}: rope_theta is {theta}.")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind != "yarn":
        raise WeightsError(f"{fields.source}: rotary embedding {kind!r} is not supported.")
    if "factor" not in scaling:
        raise WeightsError(f"{fields.source}: yarn lacks its factor.", "Pull the draft again.")
    factor = float(scaling["factor"])
    original = scaling.get("original_max_position_embeddings") or fields.integer(
        "max_position_embeddings"
    )
    numbers = {
        "factor": factor,
        "original_max_position_embeddings": float(original),
        "beta_fast": float(scaling.get("beta_fast") or 32.0),
        "beta_slow": float(scaling.get("beta_slow") or 1.0),
    }
    for name, value in numbers.items():
        if not 0.0 < value < math.inf:
            raise WeightsError(f"{fields.source}: yarn's {name} is {value:.6g}.")
    return RopeConfig(
        theta=float(theta),
        yarn_factor=factor,
        original_positions=int(original),
        beta_fast=numbers["beta_fast"],
        beta_slow=numbers["beta_slow"],
        attention_factor=float(scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0),
    )


def _layer_kinds(fields: _Fields, layers: int) -> tuple[tuple[LayerKind, ...], int | None]:
    if not 1 <= layers <= _MOST_LAYERS:
        raise WeightsError(f"{fields.source}: it has {layers:.6g} layers.", "Pull the draft again.")
    names = fields.get("layer_types") or ["full_attention"] * layers
    kinds: list[LayerKind] = []
    for name in names:
        if name not in ("full_attention", "sliding_attention"):
            raise WeightsError(f"{fields.source}: layer type {name!r} is not known.")
        kinds.append("sliding" if name == "sliding_attention" else "full")
    if len(kinds) != layers:
        raise WeightsError(
            f"{fields.source} lists {len(kinds)} layer types for {layers} draft layers."
        )
    if "sliding" not in kinds:
        return tuple(kinds), None
    window = fields.integer("sliding_window")
    if window < 1:
        raise WeightsError(f"{fields.source}: sliding_window is {window}.")
    return tuple(kinds), window


def _causal(fields: _Fields, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """One flag for all layers where given; else sliding layers are causal and full ones are not."""
    if fields.speculators:
        v2 = fields.get("selector_rank") is not None
        flag = fields.get("sliding_window_non_causal")
        non_causal = v2 if flag is None else bool(flag)
        return tuple(kind == "sliding" and not non_causal for kind in kinds)
    flag = fields.raw.get("is_causal")
    if flag is None:
        flag = fields.get("causal")
    if flag is None:
        return tuple(kind == "sliding" for kind in kinds)
    return tuple(bool(flag) for _ in kinds)


def _taps(fields: _Fields, layers: int) -> tuple[int, ...]:
    auxiliary = fields.get("aux_hidden_state_layer_ids")
    listed = fields.get("target_layer_ids")
    if fields.speculators and auxiliary is not None:
        listed = [int(layer) - 1 for layer in auxiliary]
    if listed is not None:
        if not listed:
            raise WeightsError(f"{fields.source}: target_layer_ids is empty.")
        return tuple(int(layer) for layer in listed)
    depth = fields.integer("num_target_layers")
    if layers == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers))


def _v2(fields: _Fields) -> DFlash2Config | None:
    architectures = fields.raw.get("architectures") or []
    named = any("DFlash2" in str(name) for name in architectures)
    keyed = fields.get("selector_rank") is not None and fields.get("conv_kernel_size") is not None
    if not (named or keyed):
        return None
    alone = fields.get("conv_kernel_size") == 0
    return DFlash2Config(
        conv_kernel_size=fields.integer("conv_kernel_size"),
        conv_group_size=fields.integer("conv_group_size", 1 if alone else None),
        selector_rank=fields.integer("selector_rank"),
        selector_top_k=fields.integer("selector_top_k"),
    )


def _validate(config: DraftConfig, fields: _Fields) -> None:
    sizes = ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "block_size")
    for name in (*sizes, "vocab_size", "draft_vocab_size"):
        size = getattr(config, name)
        if size is not None and not 1 <= size <= _LARGEST:
            raise WeightsError(f"{fields.source}: {name} is {size:.6g}.", "Pull the draft again.")
    if config.heads % config.kv_heads:
        raise WeightsError(
            f"{fields.source}: {config.heads} query heads do not divide over "
            f"{config.kv_heads} K/V heads."
        )
    act = fields.get("hidden_act") or "silu"
    if act != "silu":
        raise WeightsError(f"{fields.source}: activation {act!r} is not supported.")
    if fields.get("sample_from_anchor"):
        raise WeightsError(
            f"{fields.source}: drafts that sample from the anchor are not supported."
        )
    if config.v2 is not None:
        _validate_v2(config.v2, config, fields)


def _validate_v2(numbers: DFlash2Config, config: DraftConfig, fields: _Fields) -> None:
    known = config.draft_vocab_size or config.vocab_size or _MOST_CANDIDATES
    limits = {
        "conv_kernel_size": (0, _LARGEST),
        "conv_group_size": (1, config.hidden_size),
        "selector_rank": (1, _LARGEST),
        "selector_top_k": (1, min(known, _MOST_CANDIDATES)),
    }
    for name, (least, most) in limits.items():
        size = getattr(numbers, name)
        if not least <= size <= most:
            raise WeightsError(
                f"{fields.source}: {name} is {size}, it can be {least} to {most}.",
                "Pull the draft again.",
            )
    if config.hidden_size % numbers.conv_group_size:
        raise WeightsError(
            f"{fields.source}: conv_group_size {numbers.conv_group_size} does not divide "
            f"hidden size {config.hidden_size}."
        )
