"""Builds a backend from a target's folder and a draft's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map_with_path
from mlx_lm.utils import load_model, quantize_model

from dflash_local.backend import BackendInfo
from dflash_local.draft_config import DraftConfig, read_draft_config
from dflash_local.errors import OptionError, WeightsError
from dflash_local.events import LoadProgress
from dflash_local.weights import (
    check_draft,
    folder_shapes,
    read_json,
    refuse_own_code,
    weight_files,
)

from .mlx_backend import MlxBackend
from .mlx_draft import MlxDraft
from .mlx_target import Target

if TYPE_CHECKING:
    from .mlx_load import LoadOptions

DEFAULT_CONTEXT = 8192
"""Positions where a target's config does not say."""
_DTYPES: Mapping[str, mx.Dtype] = {
    "fp32": mx.float32,
    "bf16": mx.bfloat16,
    "fp16": mx.float16,
}
_BITS = {"4bit": 4, "8bit": 8}


def open_mlx(
    target_dir: Path,
    draft_dir: Path | None,
    options: LoadOptions,
    progress: Callable[[LoadProgress], None],
) -> MlxBackend:
    """As ``mlx_load.open_pair``, once MLX is known to be there."""
    _check_options(options)
    draft_config = None if draft_dir is None else _draft_config(draft_dir)
    progress(LoadProgress("target", 0, 1))
    model, config = _load_target(target_dir, options)
    target = Target(model, config, () if draft_config is None else draft_config.target_layer_ids)
    progress(LoadProgress("target", 1, 1))
    draft = None
    if draft_dir is not None and draft_config is not None:
        draft_config.check_target(
            hidden_size=target.hidden_size,
            layers=target.depth,
            embedding_rows=target.embedding_rows,
        )
        progress(LoadProgress("draft", 0, 1))
        draft = _load_draft(draft_dir, draft_config, target, options)
        progress(LoadProgress("draft", 1, 1))
    info = BackendInfo(
        backend="mlx",
        target=target_dir.name,
        draft=None if draft_dir is None else draft_dir.name,
        device=_device(),
        dtype=str(target.dtype).removeprefix("mlx.core."),
        quantization=_quantization(config),
        vocab_size=target.vocab_size,
        block_size=1 if draft_config is None else draft_config.block_size,
        context=_context(config, options.context),
        stop_ids=_stop_ids(target_dir, config),
        versions=(("mlx", mx.__version__), ("mlx-lm", mlx_lm.__version__)),
        kernels=_kernels(draft, options.draft_bits),
    )
    return MlxBackend(target, draft, info, cache_limit=_cache_limit())


def draft_dtype(
    architecture: str, bits: int | None, stored: mx.Dtype, wanted: str | None
) -> mx.Dtype:
    """Type of a draft's activations.

    The chips before M3 (GPU generations 13 and 14) have no native bf16, and there a packed draft
    with 16-bit activations loses its acceptance; fp32 keeps it.
    """
    if wanted is not None:
        return _DTYPES[wanted]
    if bits is not None and architecture.startswith(("applegpu_g13", "applegpu_g14")):
        return mx.float32
    return mx.bfloat16 if stored == mx.float32 else stored


def _check_options(options: LoadOptions) -> None:
    if options.dtype is not None and options.dtype not in _DTYPES:
        raise OptionError(f"dtype is {options.dtype!r}.", f"Give one of {', '.join(_DTYPES)}.")
    if options.draft_bits not in (None, 4, 8):
        raise OptionError(f"draft_bits is {options.draft_bits!r}.", "Give 4 or 8.")
    if options.quantize not in (None, "none", *_BITS):
        raise OptionError(
            f"MLX cannot quantise to {options.quantize!r}.", "Give 4bit, 8bit or none."
        )


def _load_target(folder: Path, options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    """The library's model, evaluated, and its config."""
    refuse_own_code(read_json(folder / "config.json"), folder)
    folder_shapes(folder)
    try:
        model, config = load_model(folder, lazy=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise WeightsError(
            f"The target in {folder} cannot be loaded with mlx-lm {mlx_lm.__version__}: {error}",
            "Choose another target, or the torch backend.",
        ) from error
    _set_dtype(model, options.dtype)
    if options.quantize in _BITS:
        if "quantization" in config:
            raise OptionError(
                f"The target in {folder} is quantised already ({_quantization(config)}).",
                "Leave quantize out.",
            )
        model, config = quantize_model(model, config, group_size=64, bits=_BITS[options.quantize])
    mx.eval(model.parameters())
    return model, config


def _set_dtype(model: Any, wanted: str | None) -> None:
    """Cast what is floating; without a wish only fp32 files change, to bf16."""
    keep = getattr(model, "cast_predicate", None) or (lambda name: True)
    stored = model.parameters()

    def cast(name: str, value: mx.array) -> mx.array:
        if not mx.issubdtype(value.dtype, mx.floating) or not keep(name):
            return value
        if wanted is not None:
            return value.astype(_DTYPES[wanted])
        return value.astype(mx.bfloat16) if value.dtype == mx.float32 else value

    model.update(tree_map_with_path(cast, stored))


def _draft_config(folder: Path) -> DraftConfig:
    """The draft's numbers, once it is known to be of a kind that this backend runs."""
    refuse_own_code(read_json(folder / "config.json"), folder)
    config = read_draft_config(folder)
    if config.v2 is not None:
        raise WeightsError(
            f"{folder} holds a DFlash 2 draft, which this backend does not run yet.",
            "Choose a DFlash draft.",
        )
    if config.draft_vocab_size is not None:
        raise WeightsError(
            f"{folder} holds a draft with a reduced vocabulary, which this backend does not run "
            "yet.",
            "Choose a draft that shares the target's vocabulary.",
        )
    check_draft(folder, config)
    return config


def _load_draft(
    folder: Path, config: DraftConfig, target: Target, options: LoadOptions
) -> MlxDraft:
    tensors: dict[str, mx.array] = {}
    for file in weight_files(folder):
        tensors.update(mx.load(str(file)))
    architecture = str(mx.device_info().get("architecture", ""))
    dtype = draft_dtype(
        architecture, options.draft_bits, tensors["norm.weight"].dtype, options.dtype
    )
    weights = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    own_embed, own_head = weights.get("embed_tokens.weight"), weights.get("lm_head.weight")
    return MlxDraft(
        config,
        weights,
        target.embed if own_embed is None else lambda ids: own_embed[ids],
        target.head if own_head is None else lambda states: states @ own_head.T,
        options.draft_bits,
    )


def _quantization(config: Mapping[str, Any]) -> str:
    packed = config.get("quantization")
    if not packed:
        return "none"
    if packed.get("mode", "affine") != "affine":
        return str(packed["mode"])
    return f"{packed['bits']}-bit g{packed['group_size']}"


def _context(config: Mapping[str, Any], wanted: int | None) -> int:
    text = config.get("text_config") or config
    most = int(text.get("max_position_embeddings") or DEFAULT_CONTEXT)
    if wanted is None:
        return most
    if not 1 <= wanted <= most:
        raise OptionError(
            f"A context of {wanted} is asked for, the target was made for {most}.",
            f"Give 1 to {most}.",
        )
    return wanted


def _stop_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End ids of the generation config, then of the config itself."""
    sources: list[Mapping[str, Any]] = [config, config.get("text_config") or {}]
    path = folder / "generation_config.json"
    if path.exists():
        sources.insert(0, read_json(path))
    ids: list[int] = []
    for source in sources:
        found = source.get("eos_token_id")
        ids += [] if found is None else found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(int(i) for i in ids))


def _device() -> str:
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())


def _kernels(draft: MlxDraft | None, bits: int | None) -> tuple[str, ...]:
    kernels = ["metal" if mx.metal.is_available() else "cpu"]
    if draft is not None and bits is not None:
        dtype = str(draft.dtype).removeprefix("mlx.core.")
        kernels.append(f"draft packed to {bits} bits, {dtype} activations")
    return tuple(kernels)


def _cache_limit() -> int:
    """Bytes of freed memory to keep for reuse: a quarter of what the GPU should use, or 4 GB."""
    quarter = int(mx.device_info().get("max_recommended_working_set_size", 0)) // 4
    return min(quarter or 1 << 30, 4 << 30)
