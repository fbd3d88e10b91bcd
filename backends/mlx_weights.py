"""The weights of a target and of a draft, from their folders, in the types asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map_with_path
from mlx_lm.utils import load_model, quantize_model

from dflash_local.demo import SOURCE_NAME
from dflash_local.errors import OptionError, WeightsError
from dflash_local.weights import folder_shapes, read_json, refuse_own_code, weight_files

from .mlx_packed import GROUP, pack

if TYPE_CHECKING:
    from .mlx_load import LoadOptions

DTYPES: Mapping[str, mx.Dtype] = {
    "fp32": mx.float32,
    "bf16": mx.bfloat16,
    "fp16": mx.float16,
}
_BITS = {"4bit": 4, "8bit": 8}
_GROUP = 64


def check_options(options: LoadOptions) -> None:
    """Refuse what cannot be honoured.

    Raises:
        OptionError: with the choices.
    """
    if options.dtype is not None and options.dtype not in DTYPES:
        raise OptionError(f"There is no dtype {options.dtype!r}.", f"Give one of {_list(DTYPES)}.")
    if options.draft_bits not in (None, 4, 8):
        raise OptionError(f"A draft cannot be packed to {options.draft_bits} bits.", "Give 4 or 8.")
    if options.quantize not in (None, "none", *_BITS):
        raise OptionError(
            f"Quantisation {options.quantize!r} is not available on this backend.",
            f"Give none or one of {_list(_BITS)}.",
        )


def load_target(folder: Path, options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    """The library's model, not yet evaluated, and its config with ``quantization`` filled in.

    Raises:
        WeightsError: files are missing, damaged, of a refused kind or of no known architecture.
        OptionError: the target cannot be quantised as asked.
    """
    refuse_own_code(read_json(folder / "config.json"), folder)
    folder_shapes(folder)
    try:
        model, config = load_model(folder, lazy=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise WeightsError(
            f"{folder} cannot be loaded with mlx-lm {mlx_lm.__version__}: {error}",
            "Choose another target, or the torch backend.",
        ) from error
    bits = _BITS.get(options.quantize or "")
    if bits is not None and "quantization" in config:
        raise OptionError(
            f"{folder} is quantised already ({describe_quantization(config)}).",
            "Leave quantize out.",
        )
    source = folder / SOURCE_NAME
    if source.is_file() and bits in (None, 4) and _wants_blocks(options):
        # fp16 holds the scales exactly, and the activations with them.
        dtype = DTYPES[options.dtype or "fp16"]
        _cast(model, dtype, dtype)
        pack(model, source, dtype)
        config["quantization"] = {"group_size": GROUP, "bits": 4}
    else:
        _cast(model, DTYPES.get(options.dtype or ""), mx.bfloat16)
        if bits is not None:
            model, config = quantize_model(model, config, group_size=_GROUP, bits=bits)
    return model, config


def load_draft(folder: Path, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Every tensor of a draft's folder, not yet evaluated."""
    tensors: dict[str, mx.array] = {}
    for file in weight_files(folder):
        read: Any = mx.load(str(file))
        tensors.update(read)
    return {
        name: tensor.astype(dtype if mx.issubdtype(tensor.dtype, mx.floating) else mx.int32)
        for name, tensor in tensors.items()
    }


def draft_dtype(architecture: str, bits: int | None, target: mx.Dtype) -> mx.Dtype:
    """Type of a draft's activations beside a target with activations of type ``target``.

    The chips before M3 (GPU generations 13 and 14) have no native bf16, and a packed draft with
    16-bit activations loses its acceptance there; fp32 keeps it. fp16 is too narrow for the states
    of some drafts, bf16 is not.
    """
    if bits is not None and architecture.startswith(("applegpu_g13", "applegpu_g14")):
        return mx.float32
    return mx.bfloat16 if target == mx.float16 else target


def describe_quantization(config: Mapping[str, Any]) -> str:
    """For example ``4-bit g32``."""
    packed = config.get("quantization")
    if not packed:
        return "none"
    if packed.get("mode", "affine") != "affine":
        return str(packed["mode"])
    return f"{packed['bits']}-bit g{packed['group_size']}"


def _wants_blocks(options: LoadOptions) -> bool:
    """Packed blocks pay on a GPU; the CPU's products over them are slow, so only when asked."""
    if options.quantize is None:
        return mx.metal.is_available() and options.dtype is None
    return options.quantize == "4bit"


def _cast(model: Any, wanted: mx.Dtype | None, instead_of_fp32: mx.Dtype) -> None:
    """Cast what is floating; without a wish only what is stored as fp32."""
    keep = getattr(model, "cast_predicate", None)

    def cast(name: str, value: mx.array) -> mx.array:
        if not mx.issubdtype(value.dtype, mx.floating) or (keep and not keep(name)):
            return value
        if wanted is not None:
            return value.astype(wanted)
        return value.astype(instead_of_fp32) if value.dtype == mx.float32 else value

    model.update(tree_map_with_path(cast, model.parameters()))


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names)
