"""Tensors of a checkpoint one at a time, never the whole file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dflash_local.errors import WeightsError
from dflash_local.weights import weight_files


class TensorReader(Mapping[str, torch.Tensor]):
    """Reads named tensors of a folder of safetensors onto one device.

    Args:
        folder: where the files lie.
        dtype: what floating tensors become; others become whole numbers.
        device: where they go.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._places: dict[str, Path] = {}
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as opened:
                self._places.update(dict.fromkeys(opened.keys(), file))

    def __getitem__(self, name: str, /) -> torch.Tensor:
        if name not in self._places:
            raise KeyError(name)
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """One tensor.

        Raises:
            WeightsError: it is missing or has another shape.
        """
        tensor = self._stored(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise WeightsError(
                f"{self._folder} holds {name} as {list(tensor.shape)}, its config says "
                f"{list(shape)}.",
                "Pull the model again.",
            )
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else torch.long)

    def raw(self, name: str) -> torch.Tensor:
        """One tensor in the type that the file holds.

        Raises:
            WeightsError: it is missing.
        """
        return self._stored(name).to(self._device)

    def _stored(self, name: str) -> torch.Tensor:
        """A view of the file, which is mapped for it alone: what is only copied from it, goes."""
        if name not in self._places:
            raise WeightsError(f"{self._folder} lacks {name}.", "Pull the model again.")
        opened: Any
        with safe_open(self._places[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor
