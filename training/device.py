"""What a training runs on: the device, what it computes in, and too little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_local.errors import EngineError
from dflash_local.free_memory import cpu_bf16

_RAN_OUT = ("out of memory", "can't allocate", "not enough memory")
"""How torch says it on a GPU, on Linux and on Windows."""


def choose_device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it itself."""
    quick = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else cpu_bf16()
    return torch.bfloat16 if quick else torch.float32


@contextmanager
def memory_errors() -> Iterator[None]:
    """Running out of memory inside is told with what to try.

    Raises:
        EngineError: it ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _RAN_OUT):
            raise
        raise EngineError(
            "There is not enough memory for this step of the training.",
            "Give a smaller --rows, or in the fit smaller --sequences or --anchors.",
        ) from error
