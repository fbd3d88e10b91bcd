"""What this machine can hold: its memory, and whether a pair fits into it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import cache

from dflash_local import fit, free_memory
from dflash_local.pairs import Files, Pair
from dflash_local.select import backend_name

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


@cache
def space_here() -> free_memory.Room:
    """The memory of this machine's backend. What is taken now is given back as another pair is
    chosen, so it is free or three quarters of all, whichever is more."""
    found = free_memory.room(backend_name())
    return replace(found, free=max(found.free, int(_SHARE * found.total)))


def fits(pair: Pair, target: Files, space: free_memory.Room) -> bool:
    """Whether the pair leaves room for a chat; true where its size is not known."""
    result = fit.fit_pair(pair, target, backend=backend_name(), free=space)
    if result is not None:
        return result.useful
    return not space.free or target.approx_bytes + pair.draft.approx_bytes <= space.free
