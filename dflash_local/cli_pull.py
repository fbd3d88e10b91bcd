"""``dflash-local pull NAME``: fetch a pair, with a bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash_local import demo, registry
from dflash_local.errors import DownloadError

_LABELS = {
    "wait": "Waiting for another process",
    "download": "Downloading",
    "unpack": "Unpacking",
    "convert": "Converting",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local pull demo"
    parser.add_argument("name", help="a name from dflash-local list")
    parser.add_argument("--json", action="store_true", help="print the folders as JSON")


def run(args: argparse.Namespace) -> int:
    """Fetch what is missing and say where it lies."""
    pair = registry.find(args.name)
    if any(target.source == "demo" for target in pair.targets):
        with _progress() as progress:
            demo.ensure(progress)
    elif all(registry.files_dir(files) is None for files in pair.targets):
        repos = f"{pair.targets[0].repo} and {pair.draft.repo}"
        raise DownloadError(
            f"Only the demo can be pulled so far; {pair.name} is {repos}.",
            f"Fetch both with hf download {pair.targets[0].repo} and hf download "
            f"{pair.draft.repo}; dflash-local then finds them.",
        )
    located = registry.locate(pair)
    if args.json:
        folders = {"target": str(located.target_dir), "draft": str(located.draft_dir)}
        print(json.dumps({"name": located.name, **folders}))  # noqa: T201
    else:
        print(f"{located.name} is ready in {located.target_dir}")  # noqa: T201
    return 0


@contextmanager
def _progress() -> Iterator[demo.Progress]:
    """A listener for progress, fit for where stderr goes."""
    if not sys.stderr.isatty():
        yield _lines(lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description:<27}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_LABELS.get(stage, stage), total=total or None)
            bars.update(tasks[stage], completed=done)

        yield show


def _lines(write: Callable[[str], None]) -> demo.Progress:
    """One line when a stage begins and one per quarter of it."""
    heard: dict[str, int] = {}

    def show(stage: str, done: int, total: int) -> None:
        label = _LABELS.get(stage, stage)
        quarter = 4 * done // total if total else 0
        if heard.get(stage, -1) >= quarter:
            return
        heard[stage] = quarter
        amount = f": {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
        write(f"{label}{amount}")

    return show
