"""The arguments that every command that loads a pair shares."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from dflash_local.engine import Engine
from dflash_local.events import LoadProgress
from dflash_local.sampling import SamplingParams

if TYPE_CHECKING:
    from dflash_local.select import LoadOptions


def load_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which pair is loaded, and how."""
    group = parser.add_argument_group("loading")
    group.add_argument(
        "--model",
        "--target",
        default="demo",
        metavar="NAME",
        help="a name from dflash-local list, or a folder with the target (default: demo)",
    )
    group.add_argument(
        "--draft", metavar="FOLDER", help="another draft than the pair's own; none loads no draft"
    )
    group.add_argument("--backend", choices=("mlx", "torch"), help="default: what fits the machine")
    group.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="default: the fastest here; a CPU keeps fp16 weights and computes in fp32",
    )
    group.add_argument("--context", type=int, metavar="N", help="positions that the caches hold")
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads (torch); default: for half of the cores, as one on a core that other "
        "programs use holds up all",
    )
    group.add_argument(
        "--quantize",
        choices=("nf4", "int8", "4bit", "8bit", "none"),
        help="how the target is stored: nf4 or int8 on torch, 4bit or 8bit on MLX; default: nf4 or "
        "4bit on a GPU, none on the CPU",
    )
    for part in ("draft", "head"):
        group.add_argument(
            f"--{part}-bits",
            type=int,
            choices=(4, 8, 16),
            help=f"bits per weight of the {part}; default: as the target"
            + (", 8 on an x86 CPU that does not quantise the target" if part == "draft" else ""),
        )
    group.add_argument(
        "--draft-window",
        type=int,
        metavar="N",
        help="positions that the draft sees at most, so that its memory and time stay bounded",
    )
    group.add_argument(
        "--kv-bits",
        type=int,
        choices=(8, 16),
        help="bits per number of the target's K/V; 8 halves them and costs time",
    )
    group.add_argument(
        "--embed-bits",
        type=int,
        choices=(8, 16),
        help="bits per number of the input embedding (torch); default: 8 on CUDA where the "
        "target is quantised, else 16",
    )


def block_argument(parser: argparse.ArgumentParser) -> None:
    """Declare how much is drafted."""
    parser.add_argument(
        "--block",
        type=block_rows,
        metavar="N",
        help="rows of one verify, off for plain decoding, auto for what pays (default)",
    )


def drafting_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how drafts come about."""
    parser.add_argument(
        "--no-tree",
        dest="branching",
        action="store_false",
        help="draft one path, the best id of every slot, instead of the likeliest continuations",
    )
    parser.add_argument(
        "--no-lookup",
        dest="lookup",
        action="store_false",
        help="let the draft stand alone, without advice from what the context repeats",
    )


def thinking_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare whether templates that know thinking switch it on; their default where neither."""
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument("--think", dest="think", action="store_true", default=None)
    thinking.add_argument("--no-think", dest="think", action="store_false", default=None)


def block_rows(text: str) -> int | None:
    """The value of ``--block``: ``auto`` is None, ``off`` is 0, else rows of one verify."""
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto nor off") from None


def load_options(args: argparse.Namespace) -> LoadOptions:
    """What the arguments of ``load_arguments`` say, apart from which pair.

    Raises:
        OptionError: a value that cannot be.
    """
    from dflash_local.select import LoadOptions

    return LoadOptions(**{item.name: getattr(args, item.name) for item in fields(LoadOptions)})


def open_engine(args: argparse.Namespace) -> Engine:
    """Load what the arguments name; steps are shown on a terminal's stderr."""
    from dflash_local.select import load

    def show(step: LoadProgress) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{step.stage} ...", end="", file=sys.stderr, flush=True)  # noqa: T201

    chosen = asdict(load_options(args))
    engine = load(args.model, draft=args.draft, progress=show, **chosen)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)  # noqa: T201
    return engine


def sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how tokens are chosen."""
    default = SamplingParams()
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens in the answer")
    group.add_argument("--temperature", type=float, default=default.temperature, metavar="T")
    group.add_argument(
        "--draft-temperature",
        type=float,
        metavar="T",
        help="the draft's temperature; 0 drafts its best ids (default: as --temperature)",
    )
    group.add_argument("--top-p", type=float, default=default.top_p, metavar="P")
    group.add_argument("--top-k", type=int, default=default.top_k, metavar="K")
    group.add_argument("--min-p", type=float, default=default.min_p, metavar="P")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument(
        "--repetition-penalty", type=float, default=default.repetition_penalty, metavar="X"
    )
    group.add_argument(
        "--presence-penalty", type=float, default=default.presence_penalty, metavar="X"
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=default.frequency_penalty, metavar="X"
    )
    drafting_arguments(parser)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="may be repeated"
    )


def sampling(args: argparse.Namespace) -> SamplingParams:
    """The settings that the arguments give.

    Raises:
        OptionError: a value is out of range.
    """
    return SamplingParams(
        temperature=args.temperature,
        draft_temperature=args.draft_temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        stop=tuple(args.stop),
        max_tokens=args.max_tokens,
        branching=args.branching,
        lookup=args.lookup,
    )
