"""``dflash-local pull NAME``: fetch a pair, with a bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from dflash_local import registry
from dflash_local.errors import (
    BackendUnavailable,
    DoesNotFit,
    OptionError,
    UnknownModel,
    how_to_install,
)
from dflash_local.hub_cache import is_repo_id
from dflash_local.pairs import Files, Pair
from dflash_local.progress import PullProgress, PullReport
from dflash_local.pull import pull

_LABELS = {
    "listing": "Asking the hub",
    "wait": "Waiting for another process",
    "download": "Downloading",
    "retry": "Trying again",
    "verify": "Checking",
    "unpack": "Unpacking",
    "convert": "Converting",
    "swept": "Tidied up",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local pull demo"
    parser.add_argument("name", help="a name from dflash-local list, or a repository ORG/NAME")
    parser.add_argument("--draft", metavar="ORG/NAME", help="fetch this draft too, or instead")
    parser.add_argument("--backend", choices=("mlx", "torch"), help="whose target; default: ours")
    parser.add_argument(
        "--weights", metavar="KIND", help="which target: bf16, nf4, ... (list --json)"
    )
    parser.add_argument("--revision", default="", metavar="COMMIT", help="of a repository ORG/NAME")
    parser.add_argument(
        "--update", action="store_true", help="look for newer files of what is here"
    )
    parser.add_argument("--anyway", action="store_true", help="fetch even what will not fit here")
    parser.add_argument("--json", action="store_true", help="print the folders as JSON")


def run(args: argparse.Namespace) -> int:
    """Fetch what is missing and say where it lies."""
    name, wanted = _wanted(args)
    if not args.anyway:
        _check_fit(name, wanted, args.backend)
    if wanted[0].weights == "nf4" and find_spec("bitsandbytes") is None:
        note = f"{name} is stored for bitsandbytes, which is not installed here."
        print(f"dflash-local: {note} {how_to_install('cuda')}", file=sys.stderr)  # noqa: T201
    with _progress() as progress:
        fetched = pull(wanted, name=name, update=args.update, progress=progress)
    target = fetched.folders[wanted[0].repo]
    draft = fetched.folders[wanted[1].repo] if len(wanted) > 1 else None
    if args.json:
        folders = {"target": str(target), "draft": None if draft is None else str(draft)}
        print(json.dumps({"name": name, **folders, "received": fetched.received}))  # noqa: T201
    else:
        print(f"{name} is ready in {target}")  # noqa: T201
    return 0


def _wanted(args: argparse.Namespace) -> tuple[str, list[Files]]:
    """The name to show and the repositories to fetch."""
    own = [Files(repo=args.draft)] if args.draft else []
    try:
        pair = registry.find(args.name)
    except UnknownModel:
        if not is_repo_id(args.name):
            raise
        return args.name, [Files(repo=args.name, revision=args.revision), *own]
    return pair.name, [choose_target(pair, args.backend, args.weights), *(own or [pair.draft])]


def choose_target(pair: Pair, backend: str | None = None, weights: str | None = None) -> Files:
    """The target of a pair for this machine: one that is here already, else the first.

    Raises:
        OptionError: none of this kind.
    """
    from dflash_local.select import backend_name

    try:
        backend = backend or backend_name()
    except BackendUnavailable:
        backend = ""
    targets = [t for t in pair.targets_for(backend) if weights in (None, t.weights)]
    if not targets:
        kinds = sorted({f"{t.weights} for {t.backend}" for t in pair.targets})
        raise OptionError(
            f"{pair.name} has no {weights or ''} target for {backend}.".replace("  ", " "),
            f"It has {', '.join(kinds)}; choose with --weights and --backend.",
        )
    return next((t for t in targets if registry.files_dir(t) is not None), targets[0])


def _check_fit(name: str, wanted: list[Files], asked: str | None) -> None:
    """Refuse a pair that this machine cannot hold, before it is fetched.

    Raises:
        DoesNotFit: with the numbers; not even a small context would fit.
    """
    from dflash_local import fit
    from dflash_local.select import backend_name

    pair = registry.registry().get(name)
    if pair is None or all(registry.files_dir(files) is not None for files in wanted):
        return
    try:
        backend = asked or backend_name()
    except BackendUnavailable:
        return
    result = fit.fit_pair(pair, wanted[0], backend=backend)
    if result is not None and result.largest_context < min(1024, result.context):
        error = fit.refusal(name, result)
        raise DoesNotFit(error.cause, "Choose a smaller pair (list --fits); --anyway fetches it.")


@contextmanager
def _progress() -> Iterator[PullReport]:
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

        def show(step: PullProgress) -> None:
            if step.note:
                bars.console.print(step.note, markup=False, highlight=False)
            if step.total and step.stage in ("download", "unpack", "convert"):
                if step.stage not in tasks:
                    tasks[step.stage] = bars.add_task(_LABELS[step.stage], total=step.total)
                bars.update(tasks[step.stage], completed=step.done, total=step.total)

        yield show


def _lines(write: Callable[[str], None]) -> PullReport:
    """One line when a stage begins, one per quarter of it, and one per remark."""
    heard: dict[str, int] = {}

    def show(step: PullProgress) -> None:
        label = _LABELS[step.stage]
        if step.note:
            write(f"{label}: {step.note}")
            return
        key = step.stage if step.total else f"{step.stage} {step.item}"
        quarter = 4 * step.done // step.total if step.total else 0
        if heard.get(key, -1) >= quarter:
            return
        heard[key] = quarter
        write(f"{label}: {amounts(step)}" if step.total else f"{label}: {step.item}")

    return show


def amounts(step: PullProgress) -> str:
    """``25 of 100 MB, 12.0 MB/s, 6 s left``, as far as it is known."""
    text = f"{step.done / 1e6:.0f} of {step.total / 1e6:.0f} MB"
    if step.rate:
        text += f", {step.rate / 1e6:.1f} MB/s"
    if step.rate and step.seconds_left:
        text += f", {step.seconds_left:.0f} s left"
    return text
