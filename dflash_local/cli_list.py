"""``dflash-local list``: the known pairs and what of each lies on this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from dflash_local import fit, registry
from dflash_local.errors import BackendUnavailable, DflashError
from dflash_local.fit import Fit
from dflash_local.pairs import Files, Pair
from dflash_local.select import backend_name


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local list --fits"
    parser.add_argument(
        "--fits", action="store_true", help="hold each against this machine's memory"
    )
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the table, or the same and more as JSON."""
    pairs = registry.registry().values()
    fits = {pair.name: fit_of(pair) for pair in pairs} if args.fits else {}
    if args.json:
        print(json.dumps([_entry(pair, fits) for pair in pairs], indent=2))  # noqa: T201
        return 0
    rows = [
        ("NAME", "STATE", *(("FITS",) if args.fits else ()), "DRAFT", "BLOCK", "VERIFIED", "MODEL")
    ]
    for pair in pairs:
        verified = "yes" if pair.verified else "no"
        rows.append(
            (
                pair.name,
                state(pair),
                *((_fits_cell(pair, fits[pair.name]),) if args.fits else ()),
                pair.kind,
                str(pair.block),
                verified,
                pair.title,
            ),
        )
    print(_table(rows))  # noqa: T201
    return 0


def fit_of(pair: Pair) -> Fit | None:
    """The best target of a pair against this machine's memory; None where sizes are not known."""
    try:
        backend = backend_name()
    except BackendUnavailable:
        return None
    results = []
    draft_dir = registry.files_dir(pair.draft)
    for files in pair.targets_for(backend):
        target_dir = registry.files_dir(files)
        if target_dir is not None and draft_dir is not None:
            with contextlib.suppress(DflashError):
                return fit.fit(target_dir, draft_dir, backend=backend)
        results.append(fit.fit_pair(pair, files, backend=backend))
    known = [result for result in results if result is not None]
    return min(known, key=lambda result: result.need.total) if known else None


def _fits_cell(pair: Pair, result: Fit | None) -> str:
    """``to 8k`` with the largest context, ``no: 18 GB`` with the need, or why it is not known."""
    if result is None:
        return _unknown(pair)
    if not result.useful:
        return f"no: {result.need.total / 1e9:.0f} GB"
    return f"to {result.largest_context / 1024:.0f}k"


def _unknown(pair: Pair) -> str:
    """Why a pair cannot be held against this machine's memory."""
    try:
        backend = backend_name()
    except BackendUnavailable:
        return "no backend here"
    if not pair.targets_for(backend):
        return f"no {backend} target"
    return "unknown until pulled"


def state(pair: Pair) -> str:
    """``ready``, ``no draft``, ``no target`` or ``-`` when nothing of the pair is here."""
    draft = registry.files_dir(pair.draft) is not None
    target = any(registry.files_dir(files) is not None for files in pair.targets)
    if target:
        return "ready" if draft else "no draft"
    return "no target" if draft and pair.draft.source == "hub" else "-"


def _entry(pair: Pair, fits: Mapping[str, Fit | None]) -> dict[str, object]:
    """The whole entry with the folders of what is here."""
    result = fits.get(pair.name)
    more: dict[str, object] = {}
    if fits:
        more["fit"] = None if result is None else {**asdict(result), "fits": result.fits}
        more["fit_unknown"] = _unknown(pair) if result is None else ""
    return {
        **more,
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
