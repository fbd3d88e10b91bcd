"""``dflash-local train``: a draft for your own target, in three stages that resume."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_local.errors import OptionError

_STAGES = ("prompts", "data", "fit")

_LABELS = {
    "prompts": "Writing prompts",
    "data": "Writing answers",
    "fit": "Fitting",
    "evaluate": "Decoding held-out prompts",
}

_QUIET_SECONDS = 30.0
"""Without a terminal, a line at least this far apart within a stage."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; what is left out is the recipe's own default."""
    parser.epilog = "example: dflash-local train ./my-model --out ./my-draft --minutes 240"
    parser.add_argument("target", help="a name from dflash-local list, or a folder with the target")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="for everything")
    parser.add_argument("--stage", choices=_STAGES, help="only this one (default: all, in order)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument(
        "--json", action="store_true", help="the draft's folder and what it is worth"
    )
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", metavar="FILE", help='JSONL of {"text": ..., "kind": ...}')
    group.add_argument("--own", type=int, metavar="N", help="prompts that the target writes")
    group.add_argument("--held-out", type=int, metavar="N", help="prompts never trained on")
    group = parser.add_argument_group("data")
    group.add_argument("--answer-tokens", type=int, metavar="N", help="most of an answer")
    group.add_argument("--sampled", type=float, metavar="SHARE", help="of answers not greedy")
    group.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, default=None, help="answers that think"
    )
    group.add_argument(
        "--features", choices=("store", "recompute"), help="tapped states on the disk, or again"
    )
    group.add_argument("--taps", type=int, metavar="N", help="target layers that are tapped")
    group.add_argument("--rows", type=int, metavar="N", help="sequences written together")
    group = parser.add_argument_group("fit")
    group.add_argument("--layers", type=int, metavar="N")
    group.add_argument("--block", type=int, metavar="N")
    group.add_argument("--short-block", type=int, metavar="N", help="block of the first part")
    group.add_argument("--short-share", type=float, metavar="SHARE", help="of the steps")
    group.add_argument("--v2", action="store_true", help="with DFlash 2's two modules")
    group.add_argument("--init", metavar="HOW", help="target, random, or a draft's folder")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N")
    length.add_argument("--minutes", type=float, metavar="N", help="of the fit alone")
    group.add_argument("--sequences", type=int, metavar="N", help="of a step")
    group.add_argument("--anchors", type=int, metavar="N", help="blocks per sequence")
    group.add_argument("--rate", type=float, metavar="X", help="highest learning rate")
    group.add_argument("--save-seconds", type=float, metavar="N", help="between checkpoints")
    group.add_argument("--eval-tokens", type=int, metavar="N", help="per held-out answer")


def run(args: argparse.Namespace) -> int:
    """Train, and say where the draft lies."""
    _check(args)
    recipe = import_module("dflash_local.training.recipe")
    training = import_module("dflash_local.training.run")

    def chosen(part: Any, **renamed: object) -> Any:
        names = {name: getattr(args, name, None) for name in part.__dataclass_fields__} | renamed
        return part(**{name: value for name, value in names.items() if value is not None})

    whole = recipe.Recipe(
        chosen(recipe.PromptsRecipe, file=args.prompts),
        chosen(recipe.DataRecipe),
        chosen(recipe.FitRecipe),
    )
    with _progress() as report:
        job = training.Training(args.target, args.out, whole, args.threads, report)
        job.run((args.stage,) if args.stage else _STAGES)
    draft, worth = args.out / "draft", job.worth()
    if args.json:
        print(json.dumps({"draft": str(draft) if worth else None, "held_out": worth}))  # noqa: T201
    elif args.stage in (None, "fit"):
        print(f"The draft is in {draft}; chat with it by --draft {draft}")  # noqa: T201
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be, before anything is loaded.

    Raises:
        OptionError: which one, and what it may be.
    """
    least = {
        "own": 0, "held_out": 1, "answer_tokens": 2, "taps": 1, "rows": 1, "layers": 1, "block": 2,
        "short_block": 2, "steps": 1, "sequences": 1, "anchors": 1, "eval_tokens": 1, "threads": 1,
    }  # fmt: skip
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            option = "--" + name.replace("_", "-")
            raise OptionError(f"{option} is {value}.", f"Give {low} or more.")
    for name in ("sampled", "short_share"):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= 1:
            raise OptionError(f"--{name.replace('_', '-')} is {value}.", "Give a share of 0 to 1.")
    for name in ("minutes", "rate", "save_seconds"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise OptionError(f"--{name.replace('_', '-')} is {value}.", "Give more than 0.")
    if args.own == 0 and not args.prompts:
        raise OptionError("There are no prompts.", "Give --prompts FILE, or more than --own 0.")


@contextmanager
def _progress() -> Iterator[Callable[[Any], None]]:
    """A listener for progress, fit for where stderr goes."""
    if not sys.stderr.isatty():
        yield _lines(lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<27}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def show(step: Any) -> None:
            if step.stage not in tasks:
                tasks[step.stage] = bars.add_task(_LABELS[step.stage], total=None, note="")
            bars.update(
                tasks[step.stage], completed=step.done, total=step.total or None, note=step.note
            )

        yield show


def _lines(write: Callable[[str], None]) -> Callable[[Any], None]:
    """One line when a stage begins and ends, and now and then between."""
    heard: dict[str, float] = {}

    def show(step: Any) -> None:
        now = time.monotonic()
        ends = step.total and step.done == step.total
        if not ends and now - heard.get(step.stage, -_QUIET_SECONDS) < _QUIET_SECONDS:
            return
        heard[step.stage] = now
        count = f"{step.done} of {step.total}" if step.total else ""
        told = ", ".join(text for text in (count, step.note) if text)
        write(f"{_LABELS[step.stage]}: {told}" if told else _LABELS[step.stage])

    return show
