"""bitsandbytes, without what its import would fetch."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

_ABSENT: Any = object()


@cache
def bitsandbytes() -> Any:
    """The library, as it lies on the disk.

    On a CPU with bf16 units its import asks the hub for code of other people and runs it, where the
    package ``kernels`` is there, and else tells people to install that. Its own kernel, which it
    falls back to, is the one that was measured here.
    """
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, hidden = log.level, sys.modules.get("kernels", _ABSENT)
    log.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it now fails
    try:
        import bitsandbytes as bnb
    finally:
        log.setLevel(level)
        if hidden is _ABSENT:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = hidden
    return bnb
