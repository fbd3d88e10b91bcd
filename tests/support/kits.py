"""One kit per backend, so that the same tests run on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dflash_local.backend import Backend
from dflash_local.draft_config import DraftConfig

Array = npt.NDArray[np.float32]
DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True, slots=True)
class Options:
    """Load options of a test."""

    dtype: str | None = "fp32"
    context: int | None = 256
    threads: int | None = 1
    quantize: str | None = None
    draft_bits: int | None = None
    head_bits: int | None = None
    draft_window: int | None = None
    kv_bits: int | None = None
    embed_bits: int | None = None


class DraftProbe(Protocol):
    """A draft on its own, numpy in and out."""

    def append(self, features: Array) -> None:
        """Project tapped states ``[rows, taps * hidden]``."""
        ...

    def hidden(self, block: list[int]) -> Array:
        """States after the final norm, ``[rows, hidden]``."""
        ...

    def logits(self, anchor: int, count: int) -> Array:
        """Scores of the slots behind the anchor, ``[count, vocab]``."""
        ...

    def keys(self, layer: int) -> Array:
        """Context keys, ``[kv_heads, length, head_dim]``, in temporal order."""
        ...

    def values(self, layer: int) -> Array:
        """Context values, likewise."""
        ...


class Kit(Protocol):
    """What the shared tests need of a backend."""

    name: str

    def open(self, target: Path, draft: Path | None, options: Options) -> Backend:
        """Load through the backend's own loader."""
        ...

    def draft(
        self, config: DraftConfig, weights: Mapping[str, Array], embed: Array, head: Array
    ) -> DraftProbe:
        """A draft over a target's embedding and head matrices, context capacity 64."""
        ...


class TorchKit:
    """PyTorch on the CPU."""

    name = "torch"

    def open(self, target: Path, draft: Path | None, options: Options) -> Backend:
        """Load through torch_load."""
        from dflash_local.backends.torch_load import open_pair

        backend: Backend = open_pair(target, draft, options, lambda step: None)
        return backend

    def draft(
        self, config: DraftConfig, weights: Mapping[str, Array], embed: Array, head: Array
    ) -> DraftProbe:
        """A TorchDraft."""
        return _TorchProbe(config, weights, embed, head)


class _TorchProbe:
    def __init__(
        self, config: DraftConfig, weights: Mapping[str, Array], embed: Array, head: Array
    ) -> None:
        import torch

        from dflash_local.backends.torch_draft import TorchDraft

        rows, matrix = torch.from_numpy(embed), torch.from_numpy(head)
        placed = {name: torch.from_numpy(array) for name, array in weights.items()}
        self._draft = TorchDraft(
            config, placed, lambda ids: rows[ids], lambda states: states @ matrix.T, 64
        )

    def append(self, features: Array) -> None:
        import torch

        self._draft.append(torch.from_numpy(features))

    def hidden(self, block: list[int]) -> Array:
        import torch

        return np.asarray(self._draft.hidden(torch.tensor(block)))

    def logits(self, anchor: int, count: int) -> Array:
        import torch

        return np.asarray(self._draft.scores(self._draft.slots(torch.tensor([anchor]), count)))

    def keys(self, layer: int) -> Array:
        return np.asarray(self._draft.context.held(layer)[0])

    def values(self, layer: int) -> Array:
        return np.asarray(self._draft.context.held(layer)[1])


class FixedKit(TorchKit):
    """PyTorch at fixed addresses."""

    name = "torch, fixed"

    def open(self, target: Path, draft: Path | None, options: Options) -> Backend:
        """As a card would run it."""
        from dflash_local.backends.torch_load import open_pair

        backend: Backend = open_pair(target, draft, options, lambda step: None, graphs=True)
        return backend


class MlxKit:
    """MLX on whatever device it finds."""

    name = "mlx"

    def open(self, target: Path, draft: Path | None, options: Options) -> Backend:
        """Load through mlx_load."""
        from dflash_local.backends.mlx_load import open_pair

        backend: Backend = open_pair(target, draft, options, lambda step: None)
        return backend

    def draft(
        self, config: DraftConfig, weights: Mapping[str, Array], embed: Array, head: Array
    ) -> DraftProbe:
        """An MlxDraft."""
        return _MlxProbe(config, weights, embed, head)


class _MlxProbe:
    def __init__(
        self, config: DraftConfig, weights: Mapping[str, Array], embed: Array, head: Array
    ) -> None:
        import mlx.core as mx

        from dflash_local.backends.mlx_draft import MlxDraft

        rows, matrix = mx.array(embed), mx.array(head)
        placed = {name: mx.array(array) for name, array in weights.items()}
        self._draft = MlxDraft(
            config, placed, lambda ids: rows[ids], lambda states: states @ matrix.T
        )

    def append(self, features: Array) -> None:
        import mlx.core as mx

        self._draft.append(mx.array(features))

    def hidden(self, block: list[int]) -> Array:
        import mlx.core as mx

        return np.asarray(self._draft.hidden(mx.array(block)))

    def logits(self, anchor: int, count: int) -> Array:
        import mlx.core as mx

        return np.asarray(self._draft.scores(self._draft.slots(mx.array([anchor]), count)))

    def keys(self, layer: int) -> Array:
        return np.asarray(self._draft.context(layer)[0][0])

    def values(self, layer: int) -> Array:
        return np.asarray(self._draft.context(layer)[1][0])


def model_kits() -> list[Kit]:
    """The kits of the backends installed here."""
    kits: list[Kit] = []
    if find_spec("torch"):
        kits.append(TorchKit())
    if find_spec("mlx") and find_spec("mlx_lm"):
        kits.append(MlxKit())
    return kits


def all_kits() -> list[Kit]:
    """Those, and PyTorch at fixed addresses."""
    return [*model_kits(), *([FixedKit()] if find_spec("torch") else [])]
