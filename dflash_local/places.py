"""Where the files of a repository lie on this machine: one look-up for pull and load, no request.

In this order: the user's own folders, the Hugging Face cache, LM Studio's folders.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from dflash_local import paths
from dflash_local.hub_cache import RepoFolder, recorded_snapshot

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HUB, LM_STUDIO, OWN = "Hugging Face cache", "LM Studio", "own folder"


@dataclass(frozen=True, slots=True)
class Place:
    """A complete model folder, and whose it is."""

    folder: Path
    owner: str
    """``HUB``, ``LM_STUDIO`` or ``OWN``; only what lies in the hub's cache is ever removed."""


def find(repo: str, revision: str = "") -> Path | None:
    """The folder of a repository, complete, or None."""
    place = look_up(repo, revision)
    return None if place is None else place.folder


def look_up(repo: str, revision: str = "") -> Place | None:
    """The same with its owner.

    Args:
        repo: ``org/name``.
        revision: a pinned commit or branch, which the hub's cache must hold; other folders do not
            say their revision and are taken as they are.
    """
    org, _, name = repo.partition("/")
    for root in own_folders():
        for folder in (root / org / name, root / f"{org}--{name}", root / name):
            if name and has_weights(folder):
                return Place(folder, OWN)
    if snapshot := hub_snapshot(repo, revision):
        return Place(snapshot, HUB)
    for root in paths.lm_studio_dirs():
        if name and has_weights(root / org / name):
            return Place(root / org / name, LM_STUDIO)
    return None


def hub_snapshot(repo: str, revision: str = "") -> Path | None:
    """A complete snapshot in the Hugging Face cache.

    A pinned revision is taken or nothing. Else what pull recorded, then what ``refs/main`` points
    to, then any other complete one: another tool may have moved the ref for a single file.
    """
    home = RepoFolder(repo)
    if revision:
        for commit in (revision, home.ref(revision)):
            if commit and has_weights(home.snapshot(commit)):
                return home.snapshot(commit)
        return None
    if pulled := recorded_snapshot(repo):
        return pulled
    for commit in (home.ref(), *home.commits()):
        if commit and has_weights(home.snapshot(commit)):
            return home.snapshot(commit)
    return None


def has_weights(folder: Path) -> bool:
    """Whether config.json and every weight file that the index names are there."""
    if not (folder / "config.json").is_file():
        return False
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return all((folder / name).is_file() for name in set(index["weight_map"].values()))
    except FileNotFoundError:
        return any(file.is_file() for file in folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def own_folders() -> tuple[Path, ...]:
    """The ``folders`` list at the top of the user's models.toml; its errors are the registry's."""
    try:
        text = (paths.config_dir() / "models.toml").read_text(encoding="utf-8")
        listed = tomllib.loads(text).get("folders", [])
    except (OSError, ValueError, RecursionError):
        return ()
    if not isinstance(listed, list):
        return ()
    folders = (paths.existing_folder(item) for item in listed if isinstance(item, str))
    return tuple(folder for folder in folders if folder is not None)
