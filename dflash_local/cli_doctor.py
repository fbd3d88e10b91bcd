"""``dflash-local doctor``: findings as text or JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local doctor --json"
    parser.add_argument(
        "--no-test", action="store_true", help="leave out the self-test of the demo"
    )
    parser.add_argument("--json", action="store_true", help="the findings for programs")


def run(args: argparse.Namespace) -> int:
    """Print findings as they come; 1 when one of them is bad."""
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
