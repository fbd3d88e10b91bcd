"""What a checkpoint folder holds, looked at before anything is loaded from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from dflash_local.errors import WeightsError

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        WeightsError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"The folder {path.parent} has no {path.name}.", "Pull the model again."
        ) from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}.", "Pull the model again.") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds no JSON object.", "Pull the model again.")
    return cast(Mapping[str, Any], value)


def refuse_code(config: Mapping[str, Any], folder: Path) -> None:
    """No checkpoint may bring its own Python.

    Raises:
        WeightsError: ``config`` names a file with code.
    """
    for key in ("auto_map", "model_file"):
        if config.get(key):
            raise WeightsError(
                f"The checkpoint in {folder} wants to run Python of its own ({key}).",
                "This is never done; choose a checkpoint of a supported architecture.",
            )


def weight_files(folder: Path, pattern: str) -> list[Path]:
    """The folder's safetensors files, none missing, none cut short.

    Raises:
        WeightsError: there are none, or they are not whole.
    """
    files = sorted(folder.glob(pattern))
    if not files:
        raise WeightsError(*_no_weights(folder))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = {str(name) for name in read_json(index).get("weight_map", {}).values()}
        missing = sorted(names - {file.name for file in files})
        if missing:
            raise WeightsError(
                f"{folder} lacks {missing[0]} ({len(missing)} of {len(names)} files are missing).",
                "Pull the model again.",
            )
    for file in files:
        _check_whole(file)
    return files


def load_tensors(folder: Path) -> dict[str, mx.array]:
    """Every tensor of the folder, lazily."""
    tensors: dict[str, mx.array] = {}
    for file in weight_files(folder, "*.safetensors"):
        tensors.update(mx.load(str(file)))
    return tensors


def _no_weights(folder: Path) -> tuple[str, str]:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if name.endswith(".gguf"):
            return f"{folder} holds GGUF weights ({name}).", "Use a safetensors or MLX checkpoint."
        if name.endswith(_PICKLES):
            return (
                f"{folder} holds pickled weights ({name}), which can run code when read.",
                "Use a safetensors checkpoint.",
            )
    return f"{folder} holds no safetensors weights.", "Pull the model again."


def _check_whole(file: Path) -> None:
    """Compare the size of a file with what its header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 8 + length <= size else None
        if not isinstance(header, dict):
            raise ValueError("the header is cut short")
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        need = 8 + length + max(ends, default=0)
        if size < need:
            raise ValueError(f"it has {size:,} bytes of {need:,}")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise WeightsError(
            f"{file} is damaged: {error}.", "Pull the model again."
        ) from None
