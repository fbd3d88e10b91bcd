"""From a model's name to an engine: files, backend, tokenizer."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from dflash_local import fit
from dflash_local.backend import Backend
from dflash_local.costs import costs_of
from dflash_local.engine import Engine, Opened
from dflash_local.errors import BackendUnavailable, OptionError, how_to_install
from dflash_local.events import LoadProgress
from dflash_local.registry import locate

Report = Callable[[LoadProgress], None]

BACKENDS = ("mlx", "torch")
_SCHEMES = {"mlx": ("4bit", "8bit", "none"), "torch": ("nf4", "int8", "none")}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a pair is to be loaded; None leaves the choice to the backend."""

    backend: str | None = None
    """``mlx`` or ``torch``."""
    dtype: str | None = None
    """``fp32``, ``bf16`` or ``fp16``."""
    context: int | None = None
    """Positions that the caches hold."""
    threads: int | None = None
    """CPU threads."""
    quantize: str | None = None
    """``nf4``, ``int8`` or ``none`` on torch, ``4bit``, ``8bit`` or ``none`` on MLX."""
    draft_bits: int | None = None
    """Bits per weight of the draft."""
    head_bits: int | None = None
    """Bits per weight of the target's output head."""
    draft_window: int | None = None
    """Most positions that a draft's layer sees; None is what it was trained with."""
    kv_bits: int | None = None
    """8 keeps the target's K/V in 8 bits; None and 16 as they are computed."""
    embed_bits: int | None = None
    """8 or 16 bits per number of the target's input embedding."""

    def __post_init__(self) -> None:
        for name in ("kv_bits", "embed_bits"):
            value = getattr(self, name)
            if value not in (None, 8, 16):
                raise OptionError(f"{name} is {value}.", "Give 8 or 16.")
        for name, most in (
            ("context", 2**31),
            ("threads", os.cpu_count() or 1024),
            ("draft_window", 2**31),
        ):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise OptionError(f"{name} is {value}.", f"Give 1 to {most}.")


class _Loader(Protocol):
    def open_pair(
        self, target_dir: Path, draft_dir: Path | None, options: LoadOptions, progress: Report
    ) -> Backend: ...


@dataclass(frozen=True, slots=True)
class PairOpener:
    """Opens one pair where it is called; can be sent to another process."""

    model: str
    draft: str | None = None
    """A folder or repo id in place of the pair's own draft; ``none`` loads no draft."""
    options: LoadOptions = field(default_factory=LoadOptions)

    def __call__(self, progress: Report) -> Opened:
        """Load backend and tokenizer.

        Raises:
            DflashError: the model is unknown, not here, damaged or not supported.
        """
        from dflash_local.tokenizer import HubTokenizer

        name = backend_name(self.options.backend)
        _refuse_foreign(name, self.options)
        plain = self.draft == "none"
        located = locate(self.model, None if plain else self.draft, backend=name)
        loader = cast(_Loader, import_module(f"dflash_local.backends.{name}_load"))
        progress(LoadProgress("reading the tokenizer", 0, 1))
        tokenizer = HubTokenizer(located.target_dir)
        draft_dir = None if plain else located.draft_dir
        fit.check(
            located.target_dir,
            draft_dir,
            backend=name,
            dtype=self.options.dtype,
            quantize=self.options.quantize,
            draft_bits=self.options.draft_bits,
            head_bits=self.options.head_bits,
            context=self.options.context,
            draft_window=self.options.draft_window,
            kv_bits=self.options.kv_bits,
        )
        backend = loader.open_pair(located.target_dir, draft_dir, self.options, progress)
        progress(LoadProgress("measuring", 0, 1))
        return Opened(backend, tokenizer, costs_of(backend) if draft_dir else None)


def _refuse_foreign(name: str, options: LoadOptions) -> None:
    """Options that only the other backend knows are refused, not dropped."""
    schemes = _SCHEMES[name]
    if options.quantize not in (None, *schemes):
        raise OptionError(
            f"There is no quantisation {options.quantize!r} on {'MLX' if name == 'mlx' else name}.",
            f"Give one of {', '.join(schemes)}.",
        )
    for option in ("threads", "head_bits", "embed_bits") if name == "mlx" else ():
        if getattr(options, option) is not None:
            raise OptionError(
                f"{option} cannot be chosen on MLX.", f"Leave --{option.replace('_', '-')} out."
            )


def backend_name(asked: str | None = None) -> str:
    """The backend for this machine: MLX on Apple Silicon, else PyTorch, whichever is installed.

    Raises:
        BackendUnavailable: what is asked for, or every backend, is missing.
    """
    if asked is not None and asked not in BACKENDS:
        raise OptionError(
            f"There is no backend called {asked!r}.", f"Give {' or '.join(BACKENDS)}."
        )
    apple = (platform.system(), platform.machine()) == ("Darwin", "arm64")
    order = (asked,) if asked else BACKENDS if apple else BACKENDS[::-1]
    for name in order:
        if find_spec(name) is not None and (name != "mlx" or find_spec("mlx_lm") is not None):
            return name
    extra = "mlx" if "mlx" in order and (asked or apple) else "cuda"
    raise BackendUnavailable(
        f"{'MLX' if extra == 'mlx' else 'PyTorch'} is not installed here.",
        how_to_install(extra),
    )


def load(
    model: str | Path = "demo",
    *,
    draft: str | Path | None = None,
    backend: str | None = None,
    dtype: str | None = None,
    context: int | None = None,
    threads: int | None = None,
    quantize: str | None = None,
    draft_bits: int | None = None,
    head_bits: int | None = None,
    draft_window: int | None = None,
    kv_bits: int | None = None,
    embed_bits: int | None = None,
    progress: Report = lambda step: None,
) -> Engine:
    """Load a pair and start its engine.

    Args:
        model: a name of the registry, a folder with the target, or its repo id.
        draft: a folder or repo id in place of the pair's own draft; ``"none"`` for no draft.
        backend: ``"mlx"`` or ``"torch"``; chosen by the machine where None.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``; the device's best where None. On a CPU fp16 is
            how weights are kept; states are computed in fp32.
        context: positions that the caches hold, prompt and answer together.
        threads: CPU threads of the torch backend.
        quantize: quantisation of the target at load.
        draft_bits: quantisation of the draft at load.
        head_bits: quantisation of the target's output head at load.
        draft_window: most positions that a draft's layer sees; bounds its memory and time.
        kv_bits: 8 keeps the target's K/V in 8 bits.
        embed_bits: 8 or 16 bits per number of the target's input embedding (torch).
        progress: called with every step of loading, on the engine's thread.

    Raises:
        DflashError: what is wrong and what to do about it.
    """
    options = LoadOptions(
        backend=backend,
        dtype=dtype,
        context=context,
        threads=threads,
        quantize=quantize,
        draft_bits=draft_bits,
        head_bits=head_bits,
        draft_window=draft_window,
        kv_bits=kv_bits,
        embed_bits=embed_bits,
    )
    opener = PairOpener(str(model), None if draft is None else str(draft), options)
    return Engine(partial(opener, progress))
