"""What this machine can hold: its memory, and whether a pair fits into it."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache

from dflash_local.pairs import Files

_SHARE = 0.75
"""Of the memory that a model may take, the system and the context taking the rest."""


@cache
def memory_here() -> int:
    """Bytes of main memory; 0 where the system does not tell.

    A GPU's own memory is not asked for: that would load a framework into the app.
    """
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def fits(target: Files, draft: Files, memory: int) -> bool:
    """Whether target and draft leave room; true where a size is not known."""
    if not memory or not target.approx_bytes:
        return True
    return target.approx_bytes + draft.approx_bytes <= _SHARE * memory
