"""Tensor files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file in one step; ``facts`` go into its header."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(dict(tensors), fresh, metadata=dict(facts or {}))
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def parts(folder: Path, suffix: str) -> list[Path]:
    """The numbered files of a stage that are done, ``part-00000`` first, up to the first gap."""
    found: list[Path] = []
    while (path := part(folder, len(found), suffix)).is_file():
        found.append(path)
    return found


def part(folder: Path, number: int, suffix: str) -> Path:
    """The name of one numbered file."""
    return folder / f"part-{number:05}{suffix}"
