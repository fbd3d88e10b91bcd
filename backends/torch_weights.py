"""Tensors of a checkpoint one at a time, never the whole file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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
            with _opened(file) as opened:
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
        with self._stored(name) as tensor:
            if shape is not None and tuple(tensor.shape) != shape:
                raise WeightsError(
                    f"{self._folder} holds {name} as {list(tensor.shape)}, its config says "
                    f"{list(shape)}.",
                    "Pull the model again.",
                )
            dtype = self._dtype if tensor.is_floating_point() else torch.long
            return tensor.to(self._device, dtype, copy=True)

    def raw(self, name: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """One tensor in the type that the file holds, or some rows of it.

        Raises:
            WeightsError: it is missing.
        """
        with self._stored(name) as tensor:
            if rows is not None:
                return tensor[rows].to(self._device)
            return tensor.to(self._device, copy=True)

    @contextmanager
    def _stored(self, name: str) -> Iterator[torch.Tensor]:
        """A view of the file, which is mapped for this one tensor and no longer than it is copied:
        no page of it is counted twice, and what happens to the file later harms nobody."""
        if name not in self._places:
            raise WeightsError(f"{self._folder} lacks {name}.", "Pull the model again.")
        with _opened(self._places[name]) as opened:
            yield opened.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A file of tensors.

    Raises:
        WeightsError: it went away or was damaged since it was checked.
    """
    try:
        opened: Any
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{file} cannot be read: {error}", "Pull the model again.") from error
