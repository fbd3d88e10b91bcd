"""Files and folders that only their owner may read: what was said concerns nobody else."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

FILE_MODE = 0o600
_FOLDER_MODE = 0o700


def private_folder(folder: Path) -> None:
    """Make a folder, or close to others one that is there and ours.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    _close_to_others(folder, _FOLDER_MODE)


def open_private(path: Path, flags: int) -> int:
    """``os.open`` of a file that nobody else may read, from now on where it was there before.

    Raises:
        OSError: it cannot be opened.
    """
    file = os.open(path, flags, FILE_MODE)
    _close_to_others(path, FILE_MODE)
    return file


def _close_to_others(path: Path, mode: int) -> None:
    # Windows keeps a user's folders to the user by other means.
    if os.name != "posix":
        return
    with suppress(OSError):  # what is somebody else's is theirs to close
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(mode)
