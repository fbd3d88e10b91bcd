"""What models take on the disk, and giving it back; only what pull brought is ever removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_local import demo, paths, places, registry
from dflash_local.hub_cache import RepoFolder, known_repos, tree_size
from dflash_local.pairs import Files, Pair


@dataclass(frozen=True, slots=True)
class Stored:
    """One repository on the disk."""

    repo: str
    folder: Path
    owner: str
    """Whose folder it is, as in ``places``; ``demo`` for the demo target."""
    size: int
    """Bytes, partials included."""
    pairs: tuple[str, ...]
    """Names of the registry's pairs that use it."""


def stored() -> list[Stored]:
    """Everything of known pairs that is here, and what else lies begun in the hub's cache."""
    users: dict[str, list[str]] = {}
    for pair in registry.registry().values():
        for files in (*pair.targets, pair.draft):
            if files.source == "hub":
                users.setdefault(files.repo, []).append(pair.name)
    found = []
    if demo.folder().is_dir():
        size = tree_size(demo.folder())
        found.append(Stored(demo.SOURCE.requirement, demo.folder(), "demo", size, ("demo",)))
    cached = set(known_repos())
    for repo in (*users, *sorted(cached - set(users))):
        place = places.look_up(repo)
        names = tuple(dict.fromkeys(users.get(repo, ())))
        if place is not None and place.owner != places.HUB:
            size = tree_size(place.folder)
            found.append(Stored(repo, place.folder, place.owner, size, names))
        elif repo in cached:
            home = RepoFolder(repo)
            found.append(Stored(repo, home.home, places.HUB, home.size(), names))
    return found


def partials() -> tuple[int, int]:
    """How many beginnings of files lie in the hub's cache, and their bytes."""
    sizes = [p.stat().st_size for repo in known_repos() for p in RepoFolder(repo).partials()]
    return len(sizes), sum(sizes)


def remove_partials() -> tuple[int, int]:
    """Delete them, but for those that another process is filling."""
    counts = [RepoFolder(repo).sweep(None) for repo in known_repos()]
    return sum(count for count, _ in counts), sum(freed for _, freed in counts)


def removable(pair: Pair) -> tuple[list[Files], list[str]]:
    """What of a pair can be deleted, and in words why the rest stays."""
    gone, kept = [], []
    others = [p for p in registry.registry().values() if p.name != pair.name]
    for files in dict.fromkeys((*pair.targets, pair.draft)):
        if files.source == "demo" and demo.folder().is_dir():
            gone.append(files)
        if files.source != "hub":
            continue
        place = places.look_up(files.repo, files.revision)
        user = next((p.name for p in others if _uses(p, files.repo)), "")
        if place is not None and place.owner != places.HUB:
            kept.append(f"{files.repo} lies in {place.folder} ({place.owner})")
        elif RepoFolder(files.repo).home.is_dir():
            if user:
                kept.append(f"{files.repo} is used by {user} too")
            else:
                gone.append(files)
    return gone, kept


def remove(files: Iterable[Files]) -> int:
    """Delete repositories; returns the bytes freed."""
    freed = 0
    for item in files:
        if item.source == "demo":
            freed += tree_size(demo.folder())
            shutil.rmtree(demo.folder())
        else:
            freed += RepoFolder(item.repo).remove()
    return freed


def free_bytes() -> int:
    """Free bytes on the disk of the hub's cache."""
    folder = paths.hub_cache_dir()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _uses(pair: Pair, repo: str) -> bool:
    """Whether another pair that is complete here needs this repository."""
    if repo == pair.draft.repo:
        return any(registry.files_dir(t) for t in pair.targets)
    return any(t.repo == repo for t in pair.targets) and registry.files_dir(pair.draft) is not None
