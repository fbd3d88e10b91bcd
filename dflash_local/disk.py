"""What every large write asks of the disk: may it write there, is there room, why did it fail."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from dflash_local.errors import DflashError, DownloadError

_RESERVE = 64 * 2**20
"""Bytes that stay free beyond what is fetched."""


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, is used up."""
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def check_writable(folder: Path, cure: str) -> None:
    """Make the folder, and fail at once where no file can be made in it.

    Raises:
        DownloadError: naming the folder, with ``cure`` as the next step.
        OSError: the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if is_full(error):
            raise
        raise cannot_write(folder, error, cure) from error


def cannot_write(place: object, error: OSError, cure: str) -> DownloadError:
    """The error for a place that refuses to be written."""
    return DownloadError(f"{place} cannot be written: {error.strerror or error}.", cure)


def check_space(
    folder: Path,
    size: int,
    what: str,
    cure: str,
    *,
    error: type[DflashError] = DownloadError,
    reserve: int = _RESERVE,
) -> None:
    """Refuse before the first byte where the disk cannot hold ``size`` bytes and the reserve.

    Raises:
        DownloadError: with both numbers; or the ``error`` that was asked for.
    """
    needed, free = size + reserve, shutil.disk_usage(folder).free
    if free < needed:
        raise error(
            f"{what}{amount(needed)} are needed and the disk of {folder} has {amount(free)} free.",
            cure,
        )


def amount(size: int) -> str:
    """Bytes for a person."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"
