"""``dflash-local rm NAME``: delete a pair's files, or left-over partials."""

from __future__ import annotations

import argparse
import json
import sys

from dflash_local import registry, storage
from dflash_local.errors import OptionError
from dflash_local.hub_cache import RepoFolder, is_repo_id
from dflash_local.pairs import Files


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local rm qwen3-4b --yes"
    parser.add_argument("name", nargs="?", help="a name from dflash-local list, or ORG/NAME")
    parser.add_argument("--partials", action="store_true", help="delete begun downloads instead")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="say what was freed as JSON")


def run(args: argparse.Namespace) -> int:
    """Ask, delete, say how much that freed."""
    if args.partials == (args.name is not None):
        raise OptionError("Give a name or --partials.", "See dflash-local rm --help.")
    if args.partials:
        count, freed = storage.remove_partials()
        return _say(args, f"{count} partial files", freed, [])
    if is_repo_id(args.name) and RepoFolder(args.name).home.is_dir():
        gone, kept = [Files(repo=args.name)], list[str]()
    else:
        pair = registry.find(args.name)
        gone, kept = storage.removable(pair)
        if pair.name not in registry.shipped():
            kept.append(f"the entry in {registry.user_file()}; delete it there")
    repos = ", ".join(files.repo for files in gone)
    if gone and not args.yes and not _agreed(repos):
        return 1
    freed = storage.remove(gone)
    return _say(args, repos or "nothing", freed, kept)


def _agreed(what: str) -> bool:
    if not sys.stdin.isatty():
        raise OptionError(f"This would delete {what}.", "Add --yes to do it without a terminal.")
    print(f"Delete {what}? Other tools see the same cache. [y/N] ", end="", flush=True)  # noqa: T201
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _say(args: argparse.Namespace, what: str, freed: int, kept: list[str]) -> int:
    if args.json:
        print(json.dumps({"removed": what, "freed": freed, "kept": kept}))  # noqa: T201
        return 0
    print(f"Removed {what}: {freed / 1e6:,.0f} MB freed")  # noqa: T201
    for line in kept:
        print(f"Kept: {line}")  # noqa: T201
    return 0
