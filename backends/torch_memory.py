"""A card's memory: what is free before a load, a limit that fails loudly, and errors that help."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dflash_local import fit
from dflash_local.errors import EngineError
from dflash_local.free_memory import Room

RESERVE = 768 * 2**20
"""Bytes left to the desktop and to other programs."""

_ADVICE = (
    "Try a smaller --context, stronger quantisation (--quantize nf4, --draft-bits 4, --kv-bits 8), "
    "or a smaller model."
)
_CPU_SAYS = ("can't allocate memory", "not enough memory")


def card_room(device: torch.device) -> Room:
    """What may be taken of a card now; other programs' share is counted."""
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    return Room("cuda", name, max(0, free - RESERVE), total)


def require_room(
    target_dir: Path,
    draft_dir: Path | None,
    device: torch.device,
    *,
    dtype: str,
    quantize: str,
    draft_bits: int | None,
    head_bits: int | None,
    context: int,
    draft_window: int | None,
    kv_bits: int | None,
) -> None:
    """Refuse a pair that the card has no room for, before anything is loaded.

    Raises:
        DoesNotFit: with all numbers and the largest context that would fit.
    """
    fit.check(
        target_dir,
        draft_dir,
        backend="torch",
        dtype=dtype,
        quantize=quantize,
        draft_bits=draft_bits,
        head_bits=head_bits,
        context=context,
        draft_window=draft_window,
        kv_bits=kv_bits,
        free=card_room(device),
    )


def fail_loudly(device: torch.device) -> None:
    """Let no allocation pass what is free now.

    The driver on Windows lends main memory instead of refusing, and every step is then many times
    slower without a word.
    """
    if sys.platform != "win32":
        return
    room = card_room(device)
    held = torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (room.free + held) / room.total), device)


@contextmanager
def memory_errors(what: str, device: torch.device) -> Iterator[None]:
    """Running out of memory inside becomes an error with what to try.

    What the failed step had allocated is free again when it is raised.

    Raises:
        EngineError: ``what`` as its cause.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(
            words in str(error) for words in _CPU_SAYS
        ):
            raise
        traceback.clear_frames(error.__traceback__)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        told = EngineError(what, _ADVICE)
    else:
        return
    raise told
