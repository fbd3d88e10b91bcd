"""Builds a backend from a target's folder and a draft's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from dflash_local.backend import BackendInfo
from dflash_local.draft_config import DraftConfig, read_draft_config
from dflash_local.errors import DraftMismatch, OptionError
from dflash_local.events import LoadProgress
from dflash_local.weights import (
    check_draft,
    check_draft_ids,
    own_rows,
    read_json,
    refuse_own_code,
    stop_ids,
)

from .mlx_backend import MlxBackend
from .mlx_draft import MlxDraft, Rows
from .mlx_host import read_ints, wait
from .mlx_layers import LayeredTarget, known
from .mlx_plain import PlainTarget, unrevocable_kinds
from .mlx_target import Target
from .mlx_weights import (
    check_options,
    describe_quantization,
    draft_dtype,
    load_draft,
    load_target,
)

if TYPE_CHECKING:
    from .mlx_load import LoadOptions

DEFAULT_CONTEXT = 8192
"""Positions where a target's config does not say."""


def open_mlx(
    target_dir: Path,
    draft_dir: Path | None,
    options: LoadOptions,
    progress: Callable[[LoadProgress], None],
) -> MlxBackend:
    """As ``mlx_load.open_pair``, once MLX is known to be there."""
    check_options(options)
    steps = 3 if draft_dir else 2
    progress(LoadProgress("checking files", 0, steps))
    draft_config = None if draft_dir is None else _draft_config(draft_dir, options.draft_window)
    model, config = load_target(target_dir, options)
    context = _context(config, options.context)
    target: Target
    draft: MlxDraft | None = None
    if draft_dir is not None and draft_config is not None:
        layered = _tapped(model, config, draft_config, options.kv_bits)
        progress(LoadProgress("loading the target", 1, steps))
        wait(model.parameters())
        progress(LoadProgress("loading the draft", 2, steps))
        draft = _draft(draft_dir, draft_config, layered, options.draft_bits)
        target = layered
    else:
        target = _untapped(model, config, options.kv_bits)
        progress(LoadProgress("loading the target", 1, steps))
        wait(model.parameters())
    progress(LoadProgress("ready", steps, steps))
    info = BackendInfo(
        backend="mlx",
        target=target_dir.name,
        draft=None if draft_dir is None else draft_dir.name,
        device=_device(),
        dtype=_name(target.dtype),
        quantization=describe_quantization(config),
        vocab_size=target.vocab_size,
        block_size=1 if draft_config is None else draft_config.block_size,
        context=context,
        stop_ids=stop_ids(
            target_dir,
            [part.get("eos_token_id") for part in (config, config.get("text_config") or {})],
            target.vocab_size,
        ),
        versions=(("mlx", version("mlx")), ("mlx-lm", version("mlx-lm"))),
        kernels=_kernels(target, draft, options),
        branching=target.branching,
    )
    return MlxBackend(target, draft, info, cache_limit=_cache_limit())


def _draft_config(folder: Path, window: int | None) -> DraftConfig:
    """The draft's numbers, once it is known to be of a kind that this backend runs."""
    refuse_own_code(read_json(folder / "config.json"), folder)
    config = read_draft_config(folder).limited(window)
    check_draft(folder, config)
    return config


def _untapped(model: Any, config: Mapping[str, Any], kv_bits: int | None) -> Target:
    """The target alone."""
    if known(config):
        return LayeredTarget(model, config, kv_bits=kv_bits)
    if kv_bits == 8:
        raise OptionError(
            f"K/V of {config.get('model_type')} models stay as they are on MLX.",
            "Leave --kv-bits out.",
        )
    return PlainTarget(model, config)


def _tapped(
    model: Any, config: Mapping[str, Any], draft: DraftConfig, kv_bits: int | None
) -> LayeredTarget:
    """The target with the draft's taps, if both fit each other."""
    if not known(config):
        kinds = unrevocable_kinds(model)
        why = f" keeps {', '.join(kinds)}, which" if kinds else ""
        raise DraftMismatch(
            f"The target ({config.get('model_type')}){why} cannot be rolled back after a refused "
            "draft on MLX.",
            "Load it without a draft: plain decoding works.",
        )
    target = LayeredTarget(model, config, draft.target_layer_ids, kv_bits)
    draft.check_target(
        hidden_size=target.hidden_size,
        layers=target.depth,
        embedding_rows=target.embedding_rows,
    )
    return target


def _draft(folder: Path, config: DraftConfig, target: LayeredTarget, bits: int | None) -> MlxDraft:
    """The draft, over its own embedding and head where it has them, else the target's."""
    architecture = str(mx.device_info().get("architecture", ""))
    weights = load_draft(folder, draft_dtype(architecture, bits, target.dtype))
    rows, matrix = weights.get("embed_tokens.weight"), weights.get("lm_head.weight")
    offsets = weights.get("d2t")
    check_draft_ids(
        config,
        target.vocab_size,
        own_rows(folder),
        None if offsets is None else read_ints(offsets),
    )
    shared: Rows = target.head
    if offsets is not None and matrix is None:
        shared = target.head_of(mx.arange(offsets.shape[0]) + offsets)
    return MlxDraft(
        replace(config, vocab_size=target.vocab_size),
        weights,
        target.embed if rows is None else lambda ids: rows[ids],
        shared if matrix is None else lambda states: states @ matrix.T,
        bits,
    )


def _context(config: Mapping[str, Any], asked: int | None) -> int:
    text = config.get("text_config") or config
    limit = int(text.get("max_position_embeddings") or DEFAULT_CONTEXT)
    if asked is None:
        return limit
    if not 1 <= asked <= limit:
        raise OptionError(f"The context is {asked}, the model holds 1 to {limit} tokens.")
    return asked


def _device() -> str:
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())


def _kernels(target: Target, draft: MlxDraft | None, options: LoadOptions) -> tuple[str, ...]:
    kernels = ["metal" if mx.metal.is_available() else "cpu"]
    if not isinstance(target, LayeredTarget):
        kernels.append("whole-model forward, plain decoding only")
    if options.kv_bits == 8:
        kernels.append("K/V in 8 bits")
    if options.draft_window is not None:
        kernels.append(f"draft window {options.draft_window}")
    if draft is not None and options.draft_bits is not None:
        kernels.append(
            f"draft packed to {options.draft_bits} bits, {_name(draft.dtype)} activations"
        )
    return tuple(kernels)


def _name(dtype: mx.Dtype) -> str:
    names = {mx.float32: "fp32", mx.bfloat16: "bf16", mx.float16: "fp16"}
    return names.get(dtype, str(dtype))


def _cache_limit() -> int:
    """Bytes of freed memory to keep for reuse: a quarter of what the GPU should use, or 4 GB."""
    quarter = int(mx.device_info().get("max_recommended_working_set_size", 0)) // 4
    return min(quarter or 1 << 30, 4 << 30)
