"""``dflash-local du``: what models take on the disk."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from dflash_local import storage


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local du --json"
    parser.add_argument("--json", action="store_true", help="the same for programs, in bytes")


def run(args: argparse.Namespace) -> int:
    """Print sizes, largest first, then the sum, left-overs and what is free."""
    found = sorted(storage.stored(), key=lambda item: -item.size)
    count, begun = storage.partials()
    total, free = sum(item.size for item in found), storage.free_bytes()
    if args.json:
        items = [{**asdict(item), "folder": str(item.folder)} for item in found]
        partial = {"files": count, "bytes": begun}
        report = {"models": items, "total": total, "partials": partial, "free": free}
        print(json.dumps(report, indent=2))  # noqa: T201
        return 0
    for item in found:
        names = ", ".join(item.pairs) or "no pair of dflash-local"
        print(f"{item.size / 1e6:>10,.0f} MB  {item.repo}  ({names}; {item.owner})")  # noqa: T201
    print(f"{total / 1e6:>10,.0f} MB  in all; {free / 1e6:,.0f} MB are free")  # noqa: T201
    if count:
        print(  # noqa: T201
            f"{begun / 1e6:>10,.0f} MB  of it in {count} partial files; pull goes on from them, "
            "dflash-local rm --partials removes them"
        )
    return 0
