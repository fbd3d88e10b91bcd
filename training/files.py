"""Tensor files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dflash_local.errors import WeightsError
from dflash_local.whole_file import unfinished


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file in one step; ``facts`` go into its header."""
    fresh = unfinished(path)
    try:
        save_file(dict(tensors), fresh, metadata=dict(facts or {}))
        os.replace(fresh, path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{path} cannot be written: {error}.", "Free some space and give the command again."
        ) from None
    finally:
        fresh.unlink(missing_ok=True)


def whole(path: Path) -> bool:
    """Whether a safetensors file is there and complete."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def part(folder: Path, number: int, suffix: str) -> Path:
    """The name of one numbered file."""
    return folder / f"part-{number:05}{suffix}"
