"""The door of the MLX backend: says clearly where MLX cannot run, else opens a pair.

Importing this module needs no MLX.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dflash_local.backend import Backend
from dflash_local.errors import BackendUnavailable
from dflash_local.events import LoadProgress


class LoadOptions(Protocol):
    """What may be chosen at load."""

    @property
    def dtype(self) -> str | None:
        """``fp32``, ``bf16`` or ``fp16``; None keeps what the files hold, fp32 as bf16."""
        ...

    @property
    def context(self) -> int | None:
        """Positions to allow for; None is what the target was made for."""
        ...

    @property
    def draft_bits(self) -> int | None:
        """4 or 8 packs the draft's linear layers; None leaves them as they are."""
        ...

    @property
    def draft_window(self) -> int | None:
        """Most positions that a draft's layer sees; None is as it was trained."""
        ...

    @property
    def kv_bits(self) -> int | None:
        """8 keeps the target's K/V in 8 bits; None is as they are computed."""
        ...

    @property
    def quantize(self) -> str | None:
        """``4bit`` or ``8bit`` packs the target at load, ``none`` forbids it; None decides."""
        ...


def open_pair(
    target_dir: Path,
    draft_dir: Path | None,
    options: LoadOptions,
    progress: Callable[[LoadProgress], None],
) -> Backend:
    """The target in ``target_dir``, with the draft in ``draft_dir`` where given.

    Raises:
        BackendUnavailable: MLX is not installed or does not run here.
        WeightsError: files are missing, damaged or of a kind that is refused.
        DraftMismatch: the draft cannot serve this target.
        OptionError: an option cannot be honoured.
    """
    require_mlx()
    from .mlx_pair import open_mlx

    return open_mlx(target_dir, draft_dir, options, progress)


def require_mlx() -> None:
    """Refuse machines without MLX in one line.

    Raises:
        BackendUnavailable: with the way to get it, or to do without.
    """
    for module, package in (("mlx.core", "MLX"), ("mlx_lm.utils", "mlx-lm")):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise BackendUnavailable(*_advice(package, error)) from error


def _advice(package: str, error: ImportError) -> tuple[str, str]:
    """Cause and next step of a missing package on this platform."""
    here = f"{platform.system()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return f"MLX needs a Mac with Apple Silicon; this is {here}.", "Use the torch backend."
    if sys.platform not in ("darwin", "linux"):
        return f"MLX does not run on {here}.", "Use the torch backend."
    return (
        f"{package} cannot be imported on {here}: {error}.",
        "Install it with pip install 'dflash-local[mlx]', or use the torch backend.",
    )
