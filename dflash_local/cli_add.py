"""``dflash-local add NAME``: write a pair of one's own into the user's models.toml."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from dflash_local import hub, paths, places, registry
from dflash_local.draft_config import parse_draft_config
from dflash_local.errors import DownloadError, OptionError, RegistryError
from dflash_local.hub_cache import is_repo_id
from dflash_local.pairs import BACKENDS, KINDS, SHAPE_KEYS, THINKING, WEIGHTS, parse_pairs
from dflash_local.target_shape import limit_of, shape_of
from dflash_local.transfer import Patience
from dflash_local.weights import read_json
from dflash_local.whole_file import write_whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_QUICK = Patience(attempts=2, timeout=10.0)
"""What a hub may take that is only asked for sizes."""
_LARGEST = 10**8
"""More tokens than any model takes."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = (
        "example: dflash-local add mine --target org/model-4bit --draft org/model-DFlash"
    )
    parser.add_argument("name", help="what to call the pair: lower case, digits, dot, dash")
    parser.add_argument("--target", required=True, metavar="REPO", help="ORG/NAME or a folder")
    parser.add_argument("--draft", required=True, metavar="REPO", help="ORG/NAME or a folder")
    parser.add_argument("--title", help="shown in list; default: the name")
    parser.add_argument("--base", metavar="ORG/NAME", help="the original model of the target")
    parser.add_argument("--backend", choices=BACKENDS, default="any")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="default: bf16")
    parser.add_argument("--kind", choices=KINDS, help="default: what the draft's config says")
    parser.add_argument("--block", type=int, metavar="N", help="default: the draft's config")
    parser.add_argument("--context", type=int, metavar="N", help="default: the target's config")
    parser.add_argument("--thinking", choices=THINKING, default="unknown")
    parser.add_argument("--replace", action="store_true", help="take the place of an entry")
    parser.add_argument("--json", action="store_true", help="say where it went as JSON")


def run(args: argparse.Namespace) -> int:
    """Check the entry, write it, say where."""
    if not registry_name(args.name):
        raise OptionError(
            f"{args.name!r} is no usable name.", "Use lower-case letters, digits, dot, dash."
        )
    for place in (args.target, args.draft):
        _check_place(place)
    for option, value in (("--block", args.block), ("--context", args.context)):
        if value is not None and not 1 <= value <= _LARGEST:
            raise OptionError(f"{option} is {value}.", f"Give 1 to {_LARGEST}.")
    file = registry.user_file()
    registry.registry()  # a broken file is reported before anything is written
    old = file.read_text(encoding="utf-8") if file.is_file() else "schema = 1\n"
    header = f'[pair."{args.name}"'
    if args.name in tomllib.loads(old).get("pair", {}):
        if not args.replace:
            raise OptionError(f"{file} has a pair called {args.name}.", "Add --replace.")
        old = _without(old, args.name)
    text = old.rstrip() + "\n\n" + _entry(args, header) + "\n"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise OptionError(
            "The folder or the title has letters that are no UTF-8, as models.toml must be.",
            "Rename the folder, or give another title.",
        ) from None
    try:
        parse_pairs(tomllib.loads(text), str(file), text)
    except tomllib.TOMLDecodeError as error:
        raise RegistryError(f"The entry would not be valid TOML: {error}.") from error
    write_whole(file, text)
    if args.name in registry.shipped():
        note = f"{args.name} now stands for this entry; without it the shipped pair is back."
        print(f"dflash-local: {note}", file=sys.stderr)  # noqa: T201
    if args.json:
        print(json.dumps({"name": args.name, "file": str(file)}))  # noqa: T201
    else:
        print(f"{args.name} is in {file}")  # noqa: T201
    return 0


def registry_name(name: str) -> bool:
    """Whether models.toml takes this name."""
    return re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) is not None


def _check_place(place: str) -> None:
    if not _folder(place) and not is_repo_id(place):
        raise OptionError(f"{place} is neither a folder nor ORG/NAME.", "Check the spelling.")


def _folder(place: str) -> Path | None:
    folder = paths.existing_folder(place)
    return None if folder is None else folder.resolve()


def _entry(args: argparse.Namespace, header: str) -> str:
    kind, block = args.kind, args.block
    draft, draft_size = _look(args.draft)
    target, target_size = _look(args.target)
    if draft is not None:
        config = parse_draft_config(draft, f"config.json of {args.draft}")
        kind = kind or ("dflash2" if config.v2 else "dflash")
        block = block or config.block_size
    if block is None:
        raise OptionError(
            f"The block size of {args.draft} is not known before it is here.",
            f"Give --block, or fetch the draft first: dflash-local pull {args.draft}.",
        )
    base = args.base or (args.target if not _folder(args.target) else args.name)
    context = args.context or (limit_of(target) if target is not None else 0)
    lines = [
        f"{header}]",
        f"title = {_text(args.title or args.name)}",
        f"kind = {_text(kind or 'dflash')}",
        f"base = {_text(base)}",
        f"block = {block}",
        *([f"context = {context}"] if context else []),
        f"thinking = {_text(args.thinking)}",
        "verified = false",
        *(_shape(target, header) if target is not None else ()),
        f"{header}.draft]",
        *_place(args.draft, draft_size),
        f"[{header}.target]]",
        *_place(args.target, target_size),
        f"backend = {_text(args.backend)}",
        f"weights = {_text(args.weights)}",
    ]
    return "\n".join(lines)


def _look(place: str) -> tuple[dict[str, Any] | None, int]:
    """The config of a model, from the disk or else from the hub, and the bytes of a download;
    (None, 0) where neither is to be had, which only leaves its memory unknown until it is pulled.
    """
    folder = _folder(place) or places.find(place)
    if folder is not None:
        return read_json(folder / "config.json"), 0
    if hub.offline():
        return None, 0
    try:
        size = hub.list_files(place, "", _QUICK).total
        return hub.read_config(place, _QUICK), size
    except DownloadError as error:
        note = f"{error.cause} What {place} needs is unknown until it is pulled."
        print(f"dflash-local: {note}", file=sys.stderr)  # noqa: T201
        return None, 0


def _shape(config: dict[str, Any], header: str) -> list[str]:
    """The table that memory is counted from; empty for a config of no language model."""
    shape = shape_of(config)
    if not (shape.hidden and shape.kv_heads and shape.head_dim):
        return []
    known = {key: getattr(shape, key) for key in SHAPE_KEYS}
    return [f"{header}.shape]", *(f"{k} = {v}" for k, v in known.items() if v or k == "kv_layers")]


def _place(place: str, size: int) -> list[str]:
    folder = _folder(place)
    if folder is None:
        return [f"repo = {_text(place)}", *([f"approx_bytes = {size}"] if size else [])]
    return [f"repo = {_text(str(folder))}", 'source = "folder"']


def _text(value: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of its own."""
    return json.dumps(value, ensure_ascii=False)


def _without(text: str, name: str) -> str:
    """The file without the tables of one pair."""
    kept, inside = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            path = line.strip().strip("[]")
            inside = re.fullmatch(rf'pair\."?{re.escape(name)}"?(\..*)?', path) is not None
        if not inside:
            kept.append(line)
    return "\n".join(kept) + "\n"
