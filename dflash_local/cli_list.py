"""``dflash-local list``: the known pairs and what of each lies on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from dflash_local import registry
from dflash_local.pairs import Files, Pair


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local list --json"
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the table, or the same and more as JSON."""
    pairs = registry.registry().values()
    if args.json:
        print(json.dumps([_entry(pair) for pair in pairs], indent=2))  # noqa: T201
        return 0
    rows = [("NAME", "STATE", "DRAFT", "BLOCK", "VERIFIED", "MODEL")]
    for pair in pairs:
        verified = "yes" if pair.verified else "no"
        rows.append(
            (pair.name, state(pair), pair.kind, str(pair.block), verified, pair.title),
        )
    print(_table(rows))  # noqa: T201
    return 0


def state(pair: Pair) -> str:
    """``ready``, ``no draft``, ``no target`` or ``-`` when nothing of the pair is here."""
    draft = registry.files_dir(pair.draft) is not None
    target = any(registry.files_dir(files) is not None for files in pair.targets)
    if target:
        return "ready" if draft else "no draft"
    return "no target" if draft and pair.draft.source == "hub" else "-"


def _entry(pair: Pair) -> dict[str, object]:
    """The whole entry with the folders of what is here."""
    return {
        **asdict(pair),
        "state": state(pair),
        "draft": _placed(pair.draft),
        "targets": [_placed(files) for files in pair.targets],
    }


def _placed(files: Files) -> dict[str, object]:
    folder = registry.files_dir(files)
    return {**asdict(files), "folder": None if folder is None else str(folder)}


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two blanks between."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
