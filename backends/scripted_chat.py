"""The scripted pair as a loader that an engine process can run: progress, replies, a pace."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash_local.engine import Opened
from dflash_local.errors import WeightsError
from dflash_local.events import LoadProgress
from dflash_local.text import ThinkTags

from .scripted import open_scripted


@dataclass(frozen=True, slots=True)
class ScriptedOpener:
    """Arguments of ``open_scripted``, and how the load goes."""

    replies: tuple[str, ...] = ("Hello.",)
    accepts: tuple[int, ...] = (3, 7, 0, 5)
    block_size: int = 8
    context: int = 65536
    round_ms: float = 0.0
    token_ms: float = 0.0
    tags: ThinkTags | None = None
    load_ms: float = 0.0
    """Time of the whole load, in ten steps."""
    fail: str = ""
    """Cause of a load that fails."""
    die: bool = False
    """Whether the process kills itself while it loads."""
    noise: str = ""
    """What the load prints, as native libraries do."""

    def __call__(self, progress: Callable[[LoadProgress], None], /) -> Opened:
        """Load."""
        for step in range(10):
            progress(LoadProgress("weights", step, 10))
            time.sleep(self.load_ms / 10_000.0)
        if self.noise:
            print(self.noise, flush=True)  # noqa: T201
            print(self.noise, file=sys.stderr, flush=True)  # noqa: T201
        if self.die:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        if self.fail:
            raise WeightsError(self.fail, "Pull it again.")
        progress(LoadProgress("weights", 10, 10))
        backend, tokenizer = open_scripted(
            self.replies,
            accepts=self.accepts,
            block_size=self.block_size,
            context=self.context,
            round_ms=self.round_ms,
            token_ms=self.token_ms,
            tags=self.tags,
        )
        return Opened(backend, tokenizer)
