"""``dflash-local bench``: what the draft gains on this machine, and whether the ids agree."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dflash_local import bench_plot
from dflash_local.bench import BenchReport
from dflash_local.bench import run as run_bench
from dflash_local.bench_depth import DepthReport, room_for, run_depths
from dflash_local.bench_prompts import SETS, chosen
from dflash_local.bench_sampling import run_sampled
from dflash_local.bench_sweep import run_sweep
from dflash_local.bench_view import Report, as_json, as_text
from dflash_local.cli_load import (
    block_argument,
    drafting_arguments,
    load_arguments,
    open_engine,
    thinking_arguments,
)
from dflash_local.engine import Engine
from dflash_local.errors import OptionError
from dflash_local.sampling import SamplingParams

EXIT_DIFFERENT = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local bench --model demo --set chat,code --repeats 3"
    parser.add_argument("--prompts", type=int, metavar="N", help="of each set (default: 10)")
    parser.add_argument(
        "--set",
        type=_names,
        action="extend",
        metavar="NAME,..",
        help=f"prompts to answer: {', '.join(SETS)}; may be repeated (default: all, which takes "
        "tasks and own in turn)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="medians over N passes (default: 1); of a sweep auto and the best width are repeated",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="per answer (default: 128)"
    )
    block_argument(parser)
    drafting_arguments(parser)
    parser.add_argument(
        "--sweep", action="store_true", help="auto against every fixed width, plain included"
    )
    parser.add_argument(
        "--depths",
        type=_numbers,
        metavar="N,..",
        help="prompts of so many tokens: time per round, tau, and a second turn warm and cold",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="above 0 (default: 0, greedy): sample, and set rejection sampling against comparing "
        "samples",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the first prompt, with T above 0")
    thinking_arguments(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="the whole report as JSON")
    shown.add_argument("--markdown", action="store_true", help="tables to paste into a document")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it as well: .png, .svg or .pdf"
    )
    load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Bench and report; answers that differ in fp32 are a failure, as rounding explains none."""
    _check(args)
    if args.depths and args.context is None:
        args.context = room_for(args.depths, args.max_tokens)
    with open_engine(args) as engine:
        report = _report(engine, args)
    if args.plot is not None:
        bench_plot.draw(report, args.plot)
    print(  # noqa: T201
        json.dumps(as_json(report), indent=2)
        if args.json
        else as_text(report, markdown=args.markdown)
    )
    return EXIT_DIFFERENT if report.setup.dtype == "fp32" and not _identical(report) else 0


def _check(args: argparse.Namespace) -> None:
    """Refuse before anything is loaded what cannot be benched."""
    sampled = args.temperature > 0.0
    args.set = list(dict.fromkeys(args.set or ["all"]))
    most = min(len(SETS[name]) for name in args.set)
    args.prompts = min(10, most) if args.prompts is None else args.prompts
    modes = {"--sweep": args.sweep, "--depths": bool(args.depths), "--temperature": sampled}
    chosen_modes = [name for name, given in modes.items() if given]
    if len(chosen_modes) > 1:
        raise OptionError(f"{' and '.join(chosen_modes)} exclude each other.", "Give one of them.")
    if args.sweep and args.block is not None:
        raise OptionError("--sweep tries every block.", "Leave --block out.")
    if args.repeats != 1 and (args.depths or sampled):
        raise OptionError(f"--repeats does not go with {chosen_modes[0]}.", "Leave it out.")
    for name, kept in (("--no-tree", args.branching), ("--no-lookup", args.lookup)):
        if not kept and chosen_modes:
            raise OptionError(f"{name} does not go with {chosen_modes[0]}.", "Leave it out.")
    if args.repeats < 1:
        raise OptionError(f"--repeats is {args.repeats}.", "Give 1 or more.")
    if args.max_tokens < 1:
        raise OptionError(f"--max-tokens is {args.max_tokens}.", "Give 1 or more.")
    if not 1 <= args.prompts <= most:
        raise OptionError(
            f"--prompts is {args.prompts}.", f"The set {','.join(args.set)} has 1 to {most}."
        )
    if args.seed is not None and not sampled:
        raise OptionError("--seed needs a choice to make.", "Give --temperature above 0 with it.")
    if args.plot is not None:
        bench_plot.check(args.plot)


def _report(engine: Engine, args: argparse.Namespace) -> Report:
    if args.depths:
        return run_depths(
            engine,
            args.depths,
            max_tokens=args.max_tokens,
            block=args.block,
            thinking=args.think,
            progress=_show,
        )
    if args.sweep:
        return run_sweep(
            engine,
            {name: chosen(args.prompts, name) for name in args.set},
            max_tokens=args.max_tokens,
            repeats=args.repeats,
            thinking=args.think,
            progress=_show,
        )
    prompts = chosen(args.prompts, *args.set)
    if args.temperature > 0.0:
        sampling = SamplingParams(args.temperature, max_tokens=args.max_tokens, seed=args.seed)
        return run_sampled(
            engine, prompts, sampling, block=args.block, thinking=args.think, progress=_show
        )
    return run_bench(
        engine,
        prompts,
        max_tokens=args.max_tokens,
        block=args.block,
        repeats=args.repeats,
        thinking=args.think,
        branching=args.branching,
        lookup=args.lookup,
        progress=_show,
    )


def _identical(report: Report) -> bool:
    if isinstance(report, DepthReport):
        return all(figures.identical for figures in report.depths)
    return not isinstance(report, BenchReport) or report.identical


def _show(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\r\033[K" if done == total else f"\r\033[Kprompt {done + 1} of {total}"
        print(end, end="", file=sys.stderr, flush=True)  # noqa: T201


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SETS:
            raise argparse.ArgumentTypeError(
                f"there is no set {name!r}; there are {', '.join(SETS)}"
            )
    return names


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{min(numbers)} is no depth")
    return numbers
