"""``dflash-local doctor``: findings as text or JSON, and the 4-bit kernels of cards."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any, Protocol, cast


class _Kernels(Protocol):
    """What the torch backend knows about 4-bit products; its rows are dataclasses."""

    def replay(self, targets: Sequence[str]) -> Sequence[Any]: ...

    def as_table(self, rows: Sequence[Any]) -> str: ...


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local doctor --json"
    parser.add_argument(
        "--no-test", action="store_true", help="leave out the self-test of the demo"
    )
    parser.add_argument(
        "--replay-kernels",
        metavar="TARGETS",
        help="only say which 4-bit products bitsandbytes runs slowly on which card, by the rule "
        "of the installed version, for example 8b,27b; needs no card",
    )
    parser.add_argument("--json", action="store_true", help="the findings for programs")


def run(args: argparse.Namespace) -> int:
    """Print findings as they come; 1 when one of them is bad."""
    if args.replay_kernels is not None:
        return _replay(args.replay_kernels, as_json=args.json)
    from dflash_local.doctor import Finding, examine

    findings: list[Finding] = []
    for finding in examine(self_test=not args.no_test):
        findings.append(finding)
        if not args.json:
            mark = {"ok": "  ", "warn": "! ", "bad": "X "}[finding.level]
            print(f"{mark}{finding.topic}: {finding.what}", flush=True)  # noqa: T201
            if finding.cure:
                print(f"    cure: {finding.cure}", flush=True)  # noqa: T201
    bad = any(finding.level == "bad" for finding in findings)
    if args.json:
        report = {"ok": not bad, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))  # noqa: T201
    return int(bad)


def _replay(targets: str, *, as_json: bool) -> int:
    """Print the table of 4-bit kernels.

    Raises:
        OptionError: there are no shapes for a target.
        BackendUnavailable: torch or bitsandbytes is missing.
    """
    from dflash_local.select import backend_name

    backend_name("torch")
    kernels = cast(_Kernels, import_module("dflash_local.backends.torch_kernels"))
    names = [name.strip().lower() for name in targets.split(",")]
    rows = kernels.replay(names)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))  # noqa: T201
    else:
        print(kernels.as_table(rows))  # noqa: T201
    return 0
