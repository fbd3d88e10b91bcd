"""Claim: the right of one process to the file of a chat, from its opening or creation to its end.

It is a lock on a file beside the chat's. That file stays where a chat is saved: a lock on a file
that somebody removed meanwhile would shut nobody out.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dflash_local.private import FILE_MODE, private_folder


class Claim:
    """The right to one file; not yet taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Taken by the thread of the screen, let go of by any.
        self._lock = FileLock(path.with_suffix(".lock"), mode=FILE_MODE, thread_local=False)

    def take(self) -> bool:
        """Whether the file is this process's now.

        It is too where nothing can be locked: in a folder that can only be read nobody writes, and
        a file system without locks cannot tell.
        """
        try:
            private_folder(self.path.parent)
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        except (OSError, NotImplementedError):
            pass
        return True

    def release(self) -> None:
        """Let go; a name under which nothing was saved leaves no trace."""
        if not self._lock.is_locked:
            return
        if not os.path.lexists(self.path):
            with suppress(OSError):
                os.unlink(self._lock.lock_file)
        with suppress(OSError):
            self._lock.release()
