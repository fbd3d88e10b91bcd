"""Weight files without a framework: which there are, whether they are whole, what they hold."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_local.draft_config import DraftConfig
from dflash_local.errors import DraftMismatch, WeightsError

Shapes = dict[str, tuple[int, ...]]

_AGAIN = "Pull the model again."
_LONGEST_HEADER = 100_000_000
_REFUSED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        WeightsError: it is missing, unreadable, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing.", _AGAIN) from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}.", _AGAIN) from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds no JSON object.", _AGAIN)
    return value


def refuse_own_code(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a model that wants to run Python of its own.

    Raises:
        WeightsError: its config asks for it.
    """
    for key in ("auto_map", "model_file"):
        if config.get(key):
            raise WeightsError(
                f"{folder} wants to run code of its own ({key} in config.json).",
                "Models with their own code are never run; choose another repository.",
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, every one that its index names.

    Raises:
        WeightsError: there are none, only other formats, or one is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise WeightsError(f"{index} names no weights.", _AGAIN)
        files = [folder / name for name in sorted(set(map(str, mapping.values())))]
        for file in files:
            if file.parent != folder or not file.is_file():
                raise WeightsError(f"{file} is missing.", _AGAIN)
        return files
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    if not folder.is_dir():
        raise WeightsError(f"There is no folder {folder}.", _AGAIN)
    others = sorted(f.name for f in folder.iterdir() if f.suffix in (*_REFUSED, ".gguf"))
    if others:
        raise WeightsError(
            f"{folder} holds no safetensors, only {others[0]}.",
            "Choose a repository with safetensors; other formats are not read.",
        )
    raise WeightsError(f"{folder} holds no weights.", _AGAIN)


def tensor_shapes(file: Path) -> Shapes:
    """Names and shapes of the tensors in one safetensors file, checked against its size.

    Raises:
        WeightsError: the file is truncated or damaged.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise WeightsError(f"{file} is truncated or no safetensors file.", _AGAIN)
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} is damaged: {error}.", _AGAIN) from None
    if size != 8 + length + end:
        raise WeightsError(f"{file} has {size} bytes, its header says {8 + length + end}.", _AGAIN)
    return shapes


def folder_shapes(folder: Path) -> Shapes:
    """Names and shapes of all tensors of a model, every file checked."""
    shapes: Shapes = {}
    for file in weight_files(folder):
        shapes |= tensor_shapes(file)
    return shapes


def check_draft(folder: Path, config: DraftConfig) -> None:
    """Compare a draft's files with its config.

    Raises:
        WeightsError: a file is damaged.
        DraftMismatch: a tensor is missing or has another shape than the config says.
    """
    found = folder_shapes(folder)
    for name, shape in draft_shapes(config).items():
        if name not in found:
            raise DraftMismatch(f"The draft in {folder} lacks {name}.", "Pull the draft again.")
        if found[name] != shape:
            raise DraftMismatch(
                f"The draft in {folder} holds {name} as {list(found[name])}, its config says "
                f"{list(shape)}.",
                "Pull the draft again.",
            )


def draft_shapes(config: DraftConfig) -> Shapes:
    """Every tensor that a draft's checkpoint holds at least, and its shape."""
    hidden, middle, dim = config.hidden_size, config.intermediate_size, config.head_dim
    wide, narrow = config.heads * dim, config.kv_heads * dim
    taps = len(config.target_layer_ids) * config.target_hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, taps),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (wide, hidden),
            "self_attn.k_proj.weight": (narrow, hidden),
            "self_attn.v_proj.weight": (narrow, hidden),
            "self_attn.o_proj.weight": (hidden, wide),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
            "mlp.gate_proj.weight": (middle, hidden),
            "mlp.up_proj.weight": (middle, hidden),
            "mlp.down_proj.weight": (hidden, middle),
        }
        if config.attention_bias:
            layer |= {
                "self_attn.q_proj.bias": (wide,),
                "self_attn.k_proj.bias": (narrow,),
                "self_attn.v_proj.bias": (narrow,),
                "self_attn.o_proj.bias": (hidden,),
            }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes
