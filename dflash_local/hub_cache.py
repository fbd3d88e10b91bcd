"""The Hugging Face cache as other tools know it: blobs, snapshots, refs, locks.

A snapshot is laid out after every blob of it is here and verified, config.json last; without that
file nothing takes the folder for a model, so half of one is never seen. What was pulled is recorded
with sizes, and a recorded snapshot counts only while it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local import paths
from dflash_local.transfer import PARTIAL_SUFFIX, RemoteFile
from dflash_local.whole_file import unfinished, write_whole

if TYPE_CHECKING:
    from dflash_local.hub import Listing

_FOREIGN_SUFFIX = ".incomplete"
"""Partials of huggingface_hub itself, which it never takes up again."""


_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_LONGEST_ID = 96


def is_repo_id(name: str) -> bool:
    """Whether a text can be the id of a repository, ``org/name``, by the hub's own rule."""
    return len(name) <= _LONGEST_ID and _REPO_ID.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class RepoFolder:
    """One repository in the cache."""

    repo: str

    @property
    def home(self) -> Path:
        """``models--org--name``."""
        return paths.hub_cache_dir() / _flat(self.repo)

    def blob(self, file: RemoteFile) -> Path:
        """Where the content of a file lies."""
        return self.home / "blobs" / file.etag

    def lock(self, file: RemoteFile) -> Path:
        """The lock that huggingface_hub takes for the same content."""
        return paths.hub_cache_dir() / ".locks" / _flat(self.repo) / f"{file.etag}.lock"

    def snapshot(self, commit: str) -> Path:
        """The folder with the files of a commit."""
        return self.home / "snapshots" / commit

    def publish(self, listing: Listing, revision: str) -> Path:
        """Make the snapshot of a listing whose blobs are all here; point the branch at it.

        Args:
            listing: what was fetched.
            revision: the branch asked for; empty for main. A commit gets no ref.
        """
        folder = self.snapshot(listing.commit)
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(listing.files, key=lambda f: (f.name == "config.json", f.name)):
            _link(self.blob(file), folder / file.name)
        branch = revision or "main"
        if branch != listing.commit:
            write_whole(self.home / "refs" / branch, listing.commit)
        _record(listing)
        return folder

    def commits(self) -> list[str]:
        """Commits that have a snapshot, newest first."""
        with contextlib.suppress(OSError):
            folders = [f for f in (self.home / "snapshots").iterdir() if f.is_dir()]
            return [f.name for f in sorted(folders, key=lambda f: -f.stat().st_mtime)]
        return []

    def ref(self, branch: str = "main") -> str:
        """The commit that a branch pointed to when it was last fetched; empty when unknown."""
        with contextlib.suppress(OSError):
            return (self.home / "refs" / branch).read_text(encoding="utf-8").strip()
        return ""

    def partials(self) -> list[Path]:
        """Beginnings of files, ours and those of huggingface_hub."""
        with contextlib.suppress(OSError):
            return sorted(
                path
                for path in (self.home / "blobs").iterdir()
                if path.name.endswith((PARTIAL_SUFFIX, _FOREIGN_SUFFIX))
            )
        return []

    def sweep(self, listing: Listing | None) -> tuple[int, int]:
        """Remove partials of ours that no file of ``listing`` can take up; None keeps none.

        Returns how many there were and their bytes. A partial that another process is filling
        stays.
        """
        from filelock import FileLock, Timeout

        useful = {file.etag for file in listing.files} if listing else set()
        count = freed = 0
        for partial in self.partials():
            etag = partial.name.removesuffix(PARTIAL_SUFFIX)
            if etag in useful or (partial.suffix == _FOREIGN_SUFFIX and listing is not None):
                continue
            lock = (
                paths.hub_cache_dir() / ".locks" / _flat(self.repo) / f"{etag.split('.')[0]}.lock"
            )
            lock.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(Timeout, OSError), FileLock(lock, timeout=0):
                size = partial.stat().st_size
                partial.unlink()
                count, freed = count + 1, freed + size
        return count, freed

    def size(self) -> int:
        """Bytes on disk, links counted once, partials included."""
        return tree_size(self.home)

    def remove(self) -> int:
        """Delete the repository from the cache; returns the bytes freed."""
        freed = self.size()
        shutil.rmtree(self.home)
        shutil.rmtree(paths.hub_cache_dir() / ".locks" / _flat(self.repo), ignore_errors=True)
        _forget(self.repo)
        return freed


def known_repos() -> Iterator[str]:
    """Every model repository that has a folder in the cache."""
    with contextlib.suppress(OSError):
        for folder in sorted(paths.hub_cache_dir().glob("models--*")):
            if folder.is_dir():
                yield folder.name.removeprefix("models--").replace("--", "/", 1)


def recorded(repo: str) -> Mapping[str, object]:
    """What was noted when this repository was pulled: commit and files; empty when it was not."""
    entry = _records().get(repo)
    return entry if isinstance(entry, dict) else {}


def recorded_snapshot(repo: str) -> Path | None:
    """The snapshot that was pulled, if every file of it still has its size."""
    entry = recorded(repo)
    commit, files = entry.get("revision"), entry.get("files")
    if not isinstance(commit, str) or not isinstance(files, dict):
        return None
    folder = RepoFolder(repo).snapshot(commit)
    try:
        whole = all((folder / name).stat().st_size == size for name, size in files.items())
    except OSError:
        return None
    return folder if whole and files else None


def tree_size(folder: Path) -> int:
    """Bytes of the files below a folder; a file with several names counts once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                info = os.lstat(os.path.join(base, name))
                if info.st_nlink > 1 and info.st_ino:
                    if (info.st_dev, info.st_ino) in seen:
                        continue
                    seen.add((info.st_dev, info.st_ino))
                total += info.st_size
    return total


def _flat(repo: str) -> str:
    return "models--" + repo.replace("/", "--")


def _link(blob: Path, name: Path) -> None:
    """Give a blob its file name: a relative link, else a hard link, else a copy."""
    with contextlib.suppress(OSError):
        if os.path.samefile(name, blob):
            return
    temporary = unfinished(name)
    try:
        os.symlink(os.path.relpath(blob, name.parent), temporary)
    except (OSError, NotImplementedError):  # Windows without the right to make links
        try:
            os.link(blob, temporary)
        except OSError:
            shutil.copyfile(blob, temporary)
    os.replace(temporary, name)


def _records_file() -> Path:
    return paths.data_dir() / "pulled.json"


def _records() -> dict[str, object]:
    try:
        value = json.loads(_records_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _record(listing: Listing) -> None:
    files = {file.name: file.size for file in listing.files}
    _change({listing.repo: {"revision": listing.commit, "files": files}})


def _forget(repo: str) -> None:
    _change({repo: None})


def _change(entries: Mapping[str, object]) -> None:
    from filelock import FileLock

    file = _records_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        merged = {**_records(), **entries}
        kept = {repo: entry for repo, entry in merged.items() if entry is not None}
        write_whole(file, json.dumps(kept, indent=1) + "\n")
