"""Text files that are there whole, the old one or the new, whatever stops the writer."""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_NAMED = 40
"""Characters of a file's name in the name of what becomes it; systems take 255 bytes."""


def unfinished(path: Path) -> Path:
    """A name beside ``path`` for what becomes it, hidden and of this one writer."""
    return path.with_name(f".{path.name[:_NAMED]}.{secrets.token_hex(4)}")


def is_unfinished(path: Path) -> bool:
    """Whether ``unfinished`` may have made this name."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name) is not None


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file, and its folder where that is missing, or leave the old one.

    A link stays a link to what is written, and a file that was closed to others stays closed.
    Writers at the same time do not meet: the last one stays.

    Args:
        mode: permissions of a new file, less what the umask takes away.

    Raises:
        OSError: it cannot be written.
    """
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        mode &= stat.S_IMODE(place.stat().st_mode)
    fresh = unfinished(place)
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(handle, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
        os.replace(fresh, place)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
