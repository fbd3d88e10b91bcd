"""``dflash-local bench``: what the draft gains on this machine, and whether the ids agree."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict

from dflash_local import __version__
from dflash_local.bench import BenchReport
from dflash_local.bench import run as run_bench
from dflash_local.bench_prompts import SETS, chosen
from dflash_local.bench_sampling import SampledReport, run_sampled
from dflash_local.cli_load import block_rows, load_arguments, open_engine
from dflash_local.errors import OptionError
from dflash_local.sampling import SamplingParams

EXIT_DIFFERENT = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = "example: dflash-local bench --model demo --prompts 10"
    parser.add_argument("--prompts", type=int, default=10, metavar="N", help="how many")
    parser.add_argument(
        "--set",
        choices=tuple(SETS),
        default="all",
        help="tasks by people, the demo target's own words, or both in turn (default)",
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="per answer")
    parser.add_argument(
        "--block",
        type=block_rows,
        metavar="N",
        help="rows of one verify, off for plain decoding, auto for what pays (default)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="above 0: sample, and set rejection sampling against comparing samples",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the first prompt, with T above 0")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Bench and report; answers that differ in fp32 are a failure, as rounding explains none."""
    most = len(SETS[args.set])
    if not 1 <= args.prompts <= most:
        raise OptionError(f"--prompts is {args.prompts}.", f"The set {args.set} has 1 to {most}.")

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\r\033[K" if done == total else f"\r\033[Kprompt {done + 1} of {total}"
            print(end, end="", file=sys.stderr, flush=True)  # noqa: T201

    sampling = SamplingParams(args.temperature, max_tokens=args.max_tokens, seed=args.seed)
    if sampling.greedy and args.seed is not None:
        raise OptionError("--seed needs a choice to make.", "Give --temperature above 0 with it.")
    with open_engine(args) as engine:
        if not sampling.greedy:
            sampled = run_sampled(
                engine, chosen(args.prompts, args.set), sampling, block=args.block, progress=show
            )
            print(  # noqa: T201
                json.dumps(sampled_json(sampled), indent=2) if args.json else sampled_text(sampled)
            )
            return 0
        report = run_bench(
            engine,
            chosen(args.prompts, args.set),
            max_tokens=args.max_tokens,
            block=args.block,
            progress=show,
        )
    print(json.dumps(as_json(report), indent=2) if args.json else as_text(report))  # noqa: T201
    return EXIT_DIFFERENT if report.dtype == "fp32" and report.differences else 0


def as_json(report: BenchReport) -> dict[str, object]:
    """The report as plain values."""
    return {
        "model": report.model,
        "draft": report.draft,
        "backend": report.backend,
        "device": report.device,
        "dtype": report.dtype,
        "quantization": report.quantization,
        "kernels": list(report.kernels),
        "plain": {"tok_s": report.plain.tok_s, "tokens": report.plain.tokens},
        "speculative": {"tok_s": report.speculative.tok_s, "tokens": report.speculative.tokens},
        "ratio": report.ratio,
        "tau": report.tau,
        "tau_by_kind": dict(report.by_kind),
        "draft_rate": report.draft_rate,
        "acceptance": [rate.rate for rate in report.positions],
        "acceptance_rounds": [rate.rounds for rate in report.positions],
        "identical": report.identical,
        "differences": [
            {"prompt": d.prompt, "position": d.position, "margin": d.margin}
            for d in report.differences
        ],
        "repetitive": list(report.repetitive),
        "prompts": report.prompts,
        "prompt_count": report.prompt_count,
        "max_tokens": report.max_tokens,
        "block": report.block,
        "thinking": report.thinking,
        "versions": {
            "dflash-local": __version__,
            "python": platform.python_version(),
            **dict(report.versions),
        },
    }


def sampled_json(report: SampledReport) -> dict[str, object]:
    """The report of a sampled bench as plain values."""
    fields = asdict(report)
    fields["ways"] = [{**asdict(way), "tok_s": way.tok_s} for way in report.ways]
    versions = {"dflash-local": __version__, "python": platform.python_version()}
    return {**fields, "versions": {**versions, **dict(report.versions)}}


def sampled_text(report: SampledReport) -> str:
    """The report of a sampled bench for a person."""
    lines = [
        f"{report.model} + {report.draft} · {report.backend} on {report.device} · {report.dtype}",
        f"{report.prompt_count} prompts ({report.prompts}), {report.sampling.max_tokens} tokens, "
        f"block {report.block}, temperature {report.sampling.temperature:g}",
        "",
    ]
    for way in report.ways:
        tau = f"   tau {way.tau:.2f}, {way.draft_rate:.0%} of drafts accepted" if way.tau else ""
        lines.append(f"{way.name:28} {way.tok_s:7.1f} tok/s{tau}")
    return "\n".join(lines)


def as_text(report: BenchReport) -> str:
    """The report for a person."""
    kernels = f", {', '.join(report.kernels)}" if report.kernels else ""
    lines = [
        f"{report.model} + {report.draft} · {report.backend} on {report.device} · {report.dtype}"
        f"{kernels}",
        f"{report.prompt_count} prompts ({report.prompts}), {report.max_tokens} tokens, "
        f"block {'auto' if report.block is None else report.block}, greedy",
        "",
        f"plain        {report.plain.tok_s:7.1f} tok/s",
        f"speculative  {report.speculative.tok_s:7.1f} tok/s   {report.ratio:.2f}x",
        f"tau          {report.tau:7.2f} tokens per round, {report.draft_rate:.0%} of drafts "
        "accepted",
        "accepted at  " + "  ".join(f"d{p.position} {p.rate:.0%}" for p in report.positions),
        "tau by kind  " + "  ".join(f"{kind} {tau:.2f}" for kind, tau in report.by_kind),
        "",
    ]
    if report.identical:
        lines.append("ids          identical to plain decoding on every prompt")
    for d in report.differences:
        lines.append(
            f"ids          prompt {d.prompt} differs from token {d.position} on; the target's two "
            f"best were {d.margin:.4f} apart there"
        )
    if report.repetitive:
        which = ", ".join(map(str, report.repetitive))
        lines.append(f"note         the answers to prompts {which} end in a loop, which is easy")
    return "\n".join(lines)
