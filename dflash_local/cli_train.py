"""``dflash-local train``: a draft for your own target, in three stages that resume."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_local.errors import OptionError
from dflash_local.paths import expanded
from dflash_local.start import EXIT_INTERRUPTED

_STAGES = ("prompts", "data", "fit")

_LABELS = {
    "prompts": "Writing prompts",
    "data": "Writing answers",
    "fit": "Fitting",
    "evaluate": "Decoding held-out prompts",
}

_RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**31 - 1),
    "threads": (1, os.cpu_count() or 1024),
    "own": (0, 10**7),
    "held_out": (1, 10**5),
    "answer_tokens": (2, 10**5),
    "sampled": (0, 1),
    "taps": (1, 64),
    "rows": (1, 4096),
    "layers": (1, 64),
    "draft_vocab": (2, 10**7),
    "block": (2, 64),
    "short_block": (2, 64),
    "short_share": (0, 1),
    "steps": (1, 10**8),
    "minutes": (0.01, 10**5),
    "sequences": (1, 4096),
    "anchors": (1, 4096),
    "rate": (1e-9, 100),
    "save_seconds": (0.001, 10**5),
    "eval_tokens": (1, 10**5),
}
"""What a number may be."""

_QUIET_SECONDS = 30.0
"""Without a terminal, a line at least this far apart within a stage."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; what is left out is the recipe's own default."""
    parser.epilog = "example: dflash-local train ./my-model --out ./my-draft --minutes 240"
    parser.add_argument("target", help="a name from dflash-local list, or a folder with the target")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="for everything")
    parser.add_argument("--stage", choices=_STAGES, help="only this one (default: all, in order)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of all draws (default: 0)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument(
        "--json", action="store_true", help="the draft's folder and what it is worth"
    )
    defaults = _defaults()

    def number(group: Any, name: str, kind: type, metavar: str, words: str) -> None:
        default = defaults[name]
        told = "" if default is None else f" (default: {default:g})"
        option = "--" + name.replace("_", "-")
        group.add_argument(option, type=kind, metavar=metavar, help=words + told)

    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", metavar="FILE", help='JSONL of {"text": ..., "kind": ...}')
    number(group, "own", int, "N", "prompts that the target writes")
    number(group, "held_out", int, "N", "prompts never trained on")
    group = parser.add_argument_group("data")
    number(group, "answer_tokens", int, "N", "most of an answer")
    number(group, "sampled", float, "SHARE", "of answers not greedy")
    group.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, default=None, help="answers that think"
    )
    group.add_argument(
        "--features",
        choices=("store", "recompute"),
        help=f"tapped states on the disk, or again (default: {defaults['features']})",
    )
    number(group, "taps", int, "N", "target layers that are tapped")
    number(group, "rows", int, "N", "sequences written together")
    group = parser.add_argument_group("fit")
    group.add_argument(
        "--with",
        dest="others",
        action="append",
        metavar="DIR",
        help="another training of this target: learn from its answers too (may be repeated)",
    )
    number(group, "layers", int, "N", "of the draft")
    number(group, "block", int, "N", "rows of a block, the anchor among them")
    number(group, "short_block", int, "N", "block of the first part")
    number(group, "short_share", float, "SHARE", "of the steps in that part")
    version = group.add_mutually_exclusive_group()
    version.add_argument("--v2", action="store_true", help="with DFlash 2's two modules")
    version.add_argument(
        "--selector", action="store_true", help="with DFlash 2's candidate selector alone"
    )
    number(group, "draft_vocab", int, "N", "ids that the draft can say, the frequent ones")
    group.add_argument(
        "--init",
        metavar="HOW",
        help=f"target, random, or a draft's folder (default: {defaults['init']})",
    )
    length = group.add_mutually_exclusive_group()
    number(length, "steps", int, "N", "of the fit")
    number(length, "minutes", float, "N", "of the fit alone")
    number(group, "sequences", int, "N", "of a step")
    number(group, "anchors", int, "N", "blocks per sequence")
    number(group, "rate", float, "X", "highest learning rate")
    number(group, "save_seconds", float, "N", "between checkpoints")
    number(group, "eval_tokens", int, "N", "per held-out answer")


def _defaults() -> dict[str, Any]:
    """The recipe's own numbers by name."""
    recipe = import_module("dflash_local.training.recipe")
    parts = (recipe.PromptsRecipe, recipe.DataRecipe, recipe.FitRecipe)
    return {field.name: field.default for part in parts for field in fields(part)}


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
        chosen(recipe.FitRecipe, others=tuple(args.others)),
    )
    try:
        with _progress() as report:
            job = training.Training(args.target, args.out, whole, args.threads, report)
            job.run((args.stage,) if args.stage else _STAGES)
    except KeyboardInterrupt:
        print(  # noqa: T201
            "dflash-local: stopped; the same command goes on from here", file=sys.stderr
        )
        return EXIT_INTERRUPTED
    draft, worth = args.out / "draft", job.worth()
    if args.json:
        print(json.dumps({"draft": str(draft) if worth else None, "held_out": worth}))  # noqa: T201
    elif args.stage in (None, "fit"):
        print(f"The draft is in {draft}, tau {worth['tau']:.2f} on held-out prompts.")  # noqa: T201
        print(f"Chat with it: dflash-chat --model {args.target} --draft {draft}")  # noqa: T201
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be, before anything is loaded, and spell out what is short.

    Raises:
        OptionError: which one, and what it may be.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            option = "--" + name.replace("_", "-")
            raise OptionError(f"{option} is {value}.", f"Give {low:g} to {high:g}.")
    if args.short_block is None and args.block is not None:
        args.short_block = min(args.block, _defaults()["short_block"])
    args.out = expanded(args.out, "--out")
    args.others = [str(expanded(place, "--with")) for place in args.others or ()]
    if args.prompts:
        args.prompts = str(expanded(args.prompts, "--prompts"))
    if args.init:
        args.init = str(expanded(args.init, "--init"))
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
        TextColumn("{task.fields[note]}", markup=False),
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
