"""The folder of a training: whose it is, what it was begun with, and one process at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dflash_local.errors import OptionError
from dflash_local.weights import weight_files
from dflash_local.whole_file import is_unfinished, write_whole

MARK = "training.json"
_NAMED = {
    "target": "another target",
    "prompts": "another set of prompts",
    "others": "other trainings behind --with",
}
"""What is told by its name, as its value would say nothing."""
_SAMPLES, _SAMPLE = 16, 2**16
"""A weight file is known by so many pieces of so many bytes: hashing all of it takes minutes."""


@contextmanager
def workplace(out: Path, target: Path) -> Iterator[None]:
    """Take a folder for a training of ``target``, or go on in it.

    Raises:
        OptionError: it holds other files, another target's training, or one that is running.
    """
    if out.is_dir() and not (out / MARK).is_file() and any(out.iterdir()):
        raise OptionError(f"{out} holds files of something else.", "Give a new folder to --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"{out} cannot be made: {error.strerror}.", "Give another folder to --out."
        ) from None
    lock = FileLock(out / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OptionError(
            f"Another training runs in {out}.", "Wait for it, or give another --out."
        ) from None
    try:
        for stale in out.glob("*/.*"):  # of a process that was killed while it wrote
            if is_unfinished(stale) and stale.is_file():
                stale.unlink()
        hold(out / MARK, {"target": fingerprint(target)})
        yield
    finally:
        lock.release()


def fingerprint(target: Path) -> str:
    """Tells targets apart by their contents, wherever they lie."""
    digest = hashlib.sha256()
    settings = [
        target / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    ]
    for path in (*(path for path in settings if path.is_file()), *weight_files(target)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * max(0, size - _SAMPLE) // max(1, _SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def hold(path: Path, facts: Mapping[str, Any]) -> None:
    """Write what a stage was begun with, or compare with what it was.

    Raises:
        OptionError: something differs, or the file is damaged.
    """
    before = held(path)
    if before is None:
        write_whole(path, json.dumps(facts, indent=1))
        return
    for name, now in facts.items():
        if before.get(name) == now:
            continue
        what = _NAMED.get(name) or f"{name} {before.get(name)!r}, now it is {now!r}"
        raise OptionError(
            f"{path.parent} was begun with {what}.",
            "Give the same options to resume, or another --out.",
        )


def held(path: Path) -> dict[str, Any] | None:
    """What ``hold`` wrote; None where it has not.

    Raises:
        OptionError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError
    except (ValueError, OSError, RecursionError):
        raise OptionError(
            f"{path} is damaged.", f"Delete {path.parent} to begin again, or give another --out."
        ) from None
    return facts
