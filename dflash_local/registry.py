"""Which pairs are known, and where the files of one lie on this machine.

Owns the reading of models.toml (the packaged one, then the user's own, whose entries replace those
of the same name) and the resolving of a name, repo id or folder. Never touches the network.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_local import demo, paths, places
from dflash_local.errors import NotDownloaded, RegistryError, UnknownModel, WeightsError
from dflash_local.hub_cache import is_repo_id
from dflash_local.pairs import Files, Pair, parse_pairs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TOML_LINE = re.compile(r"^(.*?)\s*\(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(frozen=True, slots=True)
class Located:
    """The files of one model, all present."""

    name: str
    target_dir: Path
    draft_dir: Path | None
    """None: plain decoding only."""
    pair: Pair | None
    """The registry's entry, where there is one."""


def packaged_file() -> Path:
    """models.toml: inside the package once installed, beside it in a source tree."""
    inside = Path(__file__).with_name("models.toml")
    return inside if inside.is_file() else Path(__file__).parent.parent / "models.toml"


def user_file() -> Path:
    """The user's own models.toml; it need not exist."""
    return paths.config_dir() / "models.toml"


def shipped() -> dict[str, Pair]:
    """The pairs that come with the program, by name, whatever the user's file says of them.

    Raises:
        RegistryError: as ``registry`` does.
    """
    return _read(packaged_file())


def registry() -> Mapping[str, Pair]:
    """All known pairs by name, in the order of the files.

    Raises:
        RegistryError: a file cannot be read or breaks the schema; names file, line and key.
    """
    pairs = shipped()
    if os.path.lexists(user_file()):
        pairs |= _read(user_file())
    return pairs


def find(name: str) -> Pair:
    """The pair of this name.

    Raises:
        UnknownModel: no such name; says which names are near.
    """
    pairs = registry()
    if pair := pairs.get(name.lower()):
        return pair
    near = difflib.get_close_matches(name.lower(), pairs, 3, 0.5)
    guess = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UnknownModel(
        f"There is no model called {_short(name) or repr(name)}.",
        f"{guess}See dflash-local list; a folder works too, or a repository ORG/NAME.",
    )


def locate(
    model: str | Path | Pair, draft: str | Path | None = None, *, backend: str = ""
) -> Located:
    """Find the files of a model without any request.

    Args:
        model: a pair, its name, a folder, or the repo id of a target.
        draft: a folder or repo id that takes the place of the pair's draft.
        backend: "mlx" or "torch" to consider only targets for it; empty takes what is there.

    Raises:
        UnknownModel: neither a known name nor a folder or repo id.
        NotDownloaded: known, but not on this machine.
        WeightsError: a folder that holds no model.
    """
    own_draft = None if draft is None else _local(draft)
    if isinstance(model, Pair):
        return _locate_pair(model, model.targets_for(backend), own_draft)
    pair = _pair_of(model)
    if pair is None:
        target_dir = _local(model)
        return Located(target_dir.name, target_dir, own_draft, None)
    targets = pair.targets_for(backend)
    if str(model).lower() != pair.name:
        exact = tuple(t for t in pair.targets if t.repo == model)
        targets = exact or (Files(repo=str(model)),)
    return _locate_pair(pair, targets, own_draft)


def _locate_pair(pair: Pair, targets: Iterable[Files], own_draft: Path | None) -> Located:
    """The first of ``targets`` that is here, with the pair's draft or the caller's own."""
    target_dir = next((found for files in targets if (found := files_dir(files))), None)
    draft_dir = own_draft or files_dir(pair.draft)
    if target_dir is None or draft_dir is None:
        part = "target" if target_dir is None else "draft"
        raise NotDownloaded(
            f"The {part} of {pair.name} is not downloaded.", f"Run dflash-local pull {pair.name}."
        )
    return Located(pair.name, target_dir, draft_dir, pair)


def files_dir(files: Files) -> Path | None:
    """The complete folder of one repository on this machine, if it is here."""
    if files.source == "demo":
        return demo.installed()
    if files.source == "package":
        return demo.draft_folder()
    if files.source == "folder":
        folder = paths.existing_folder(files.repo)
        return folder if folder is not None and places.has_weights(folder) else None
    return places.find(files.repo, files.revision)


def _pair_of(model: str | Path) -> Pair | None:
    """The entry that a name or a target's repo id belongs to; None for a folder or another repo."""
    name = str(model)
    pairs = registry()
    if isinstance(model, str) and name.lower() in pairs:
        return pairs[name.lower()]
    if paths.existing_folder(name) is not None:
        return None
    if is_repo_id(name):
        return next(
            (p for p in pairs.values() if name == p.base or any(name == t.repo for t in p.targets)),
            None,
        )
    if isinstance(model, Path) or name.startswith((".", "~", "/")) or "\\" in name or "/" in name:
        return None
    return find(name)


def _local(place: str | Path) -> Path:
    """The folder that a path or a repo id of the hub stands for."""
    folder = paths.existing_folder(place)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise WeightsError(
                f"{folder} is no model folder: it has no config.json.",
                "Give the folder that holds config.json and the .safetensors files.",
            )
        return folder.resolve()
    if isinstance(place, str) and is_repo_id(place):
        if snapshot := places.find(place):
            return snapshot
        raise NotDownloaded(
            f"{place} is neither a folder nor complete on this machine.",
            f"Check the spelling, or fetch it first: dflash-local pull {place}.",
        )
    raise WeightsError(f"There is no folder {_short(str(place))}.", "Check the path.")


def _short(name: str) -> str:
    """A name as it may stand in a message, however long somebody made it."""
    return name if len(name) <= 80 else f"{name[:60]}... ({len(name)} letters)"


def _read(file: Path) -> dict[str, Pair]:
    """The pairs of one file."""
    if file.exists() and not file.is_file():
        raise RegistryError(f"{file} is no file.", "Remove it, or put a file in its place.")
    try:
        text = file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise RegistryError(
            f"{file} cannot be read: {error.strerror or error}.",
            "Reinstall dflash-local."
            if file == packaged_file()
            else "Make it readable or remove it.",
        ) from error
    except UnicodeDecodeError as error:
        raise RegistryError(f"{file} is not UTF-8 text.", "Save it as UTF-8.") from error
    except RecursionError as error:
        raise RegistryError(f"{file} is nested too deeply.", "Correct the file.") from error
    except tomllib.TOMLDecodeError as error:
        problem, line = str(error), "1"
        if match := _TOML_LINE.match(problem):
            problem, line = match[1], match[2] or str(text.count("\n") + 1)
        raise RegistryError(
            f"{file}:{line}: not valid TOML: {problem}.", "Correct the file and run again."
        ) from error
    return parse_pairs(document, str(file), text)
