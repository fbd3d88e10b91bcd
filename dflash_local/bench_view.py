"""The reports of the bench as text, as Markdown and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from dflash_local.bench import BenchReport, Split
from dflash_local.bench_depth import DepthReport
from dflash_local.bench_sampling import SampledReport
from dflash_local.bench_setup import Setup, Spread
from dflash_local.bench_sweep import SweepReport

Report = BenchReport | SampledReport | SweepReport | DepthReport
Row = Sequence[str]

_TRACE_RUNS = 16


def as_json(report: Report) -> dict[str, object]:
    """Every field and every figure derived from them; the setup's fields come first."""
    values = asdict(report)
    setup = values.pop("setup")
    derived: dict[str, object] = {}
    if isinstance(report, BenchReport):
        derived = {
            "identical": report.identical,
            "drafted_counts": report.drafted_counts,
            "acceptance": [position.rate for position in report.positions],
        }
    elif isinstance(report, SweepReport):
        derived = {
            "best_fixed": {s.name: s.best.block for s in report.sets},
            "quotient": {s.name: s.quotient for s in report.sets},
            "steady_quotient": {s.name: s.steady_quotient for s in report.sets},
        }
    return {**setup, "versions": dict(report.setup.versions), **values, **derived}


def as_text(report: Report, *, markdown: bool = False) -> str:
    """The report for a person."""
    grid = markdown_table if markdown else text_table
    head = _head(report.setup, markdown)
    if isinstance(report, BenchReport):
        body = _bench(report, markdown)
    elif isinstance(report, SampledReport):
        body = [*_sampled_lines(report), grid(*_sampled(report))]
    elif isinstance(report, SweepReport):
        body = [f"every width once, then auto and the best one {report.repeats} times more", ""]
        body.append(grid(*_sweep(report)))
    else:
        body = [f"block {_block(report.block)}", "", grid(*_depths(report))]
    return "\n".join([*head, *body])


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def text_table(header: Row, rows: Sequence[Row]) -> str:
    """A table in columns: the first to the left, figures to the right."""
    lines = [header, *rows]
    wide = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, wide, strict=True))
        ).rstrip()
        for line in lines
    )


def _head(setup: Setup, markdown: bool) -> list[str]:
    kernels = f", {', '.join(setup.kernels)}" if setup.kernels else ""
    quantized = "" if setup.quantization == "none" else f" {setup.quantization}"
    thinking = {None: "default", True: "on", False: "off"}[setup.thinking]
    where = f"{setup.processor or 'unknown processor'} ({setup.platform})"
    lines = [
        f"{setup.model} + {setup.draft} · {setup.backend} on {setup.device} · "
        f"{setup.dtype}{quantized}{kernels}",
        where,
        ", ".join(f"{name} {version}" for name, version in setup.versions),
        f"{setup.prompt_count} prompts ({setup.prompts}), {setup.max_tokens} tokens, "
        f"template {setup.template}, thinking {thinking}",
    ]
    return ["  \n".join(lines)] if markdown else lines  # two blanks keep Markdown's line ends


def _bench(report: BenchReport, markdown: bool) -> list[str]:
    grid = markdown_table if markdown else text_table
    ranged = report.repeats > 1
    kinds: Row = ("kind", "plain tok/s", "speculative tok/s", "ratio", "tau")
    rows = [
        (
            kind.kind,
            _spread(kind.plain.tok_s, 1, ranged),
            _spread(kind.speculative.tok_s, 1, ranged),
            _spread(kind.ratio, 2, ranged),
            f"{kind.tau:.2f}" if kind.tau else "-",
        )
        for kind in report.kinds
    ]
    total = (
        "all",
        _spread(report.plain.tok_s, 1, ranged),
        _spread(report.speculative.tok_s, 1, ranged),
        _spread(report.ratio, 2, ranged),
        f"{report.tau:.2f}" if report.tau else "-",
    )
    peak = report.memory.peak
    held = f"{_mib(report.memory.weights + report.memory.draft)} weights, "
    held += f"{_mib(report.memory.cache)} caches"
    facts = [
        ("accepted at", "  ".join(f"d{p.position} {p.rate:.0%}" for p in report.positions)),
        (
            "drafts",
            f"{'trees' if report.branching else 'paths'}{' with lookup' if report.lookup else ''}, "
            f"{report.draft_rate:.0%} accepted",
        ),
        ("plain step", _split(report.plain_split)),
        ("round", _split(report.split) if report.split else "none drafted"),
        ("first token", f"{_spread(report.first_token_ms, 0, True)} ms"),
        (
            "memory",
            f"{held}; peak {_mib(peak) + ' on the device, ' if peak else ''}"
            f"{_mib(report.process_peak)} of the process",
        ),
        ("drafted", _counts(report.drafted_counts)),
        ("widths", _trace(report.widths[0]) + " (prompt 0)"),
    ]
    if report.identical:
        facts.append(("ids", "identical to plain decoding on every prompt"))
    for d in report.differences:
        facts.append(
            (
                "ids",
                f"prompt {d.prompt} differs from token {d.position} on; the target's two best "
                f"were {d.margin:.4f} apart there",
            )
        )
    if report.repetitive:
        which = ", ".join(map(str, report.repetitive))
        facts.append(("note", f"the answers to prompts {which} end in a loop, which is easy"))
    facts = [fact for fact in facts if fact[1]]
    listed = [f"- {name}: {value}" if markdown else f"{name:12} {value}" for name, value in facts]
    how = f"block {_block(report.block)}, greedy, repeats {report.repeats}"
    if ranged:
        how += ": medians (least to most)"
    shown = rows if len(rows) == 1 else [*rows, total]
    return [how, "", grid(kinds, shown), "", *listed]


def _sampled_lines(report: SampledReport) -> list[str]:
    return [f"block {report.block}, temperature {report.sampling.temperature:g}", ""]


def _sampled(report: SampledReport) -> tuple[Row, list[Row]]:
    rows = [
        (
            way.name,
            f"{way.tok_s:.1f}",
            f"{way.tau:.2f}" if way.tau else "",
            f"{way.draft_rate:.0%}" if way.tau else "",
        )
        for way in report.ways
    ]
    return ("way", "tok/s", "tau", "accepted"), list(rows)


def _sweep(report: SweepReport) -> tuple[Row, list[Row]]:
    blocks = [width.block for width in report.sets[0].fixed]
    header = (
        "set",
        "auto",
        *(_block(block) for block in blocks),
        *("auto again", "best again", "auto / best fixed", "at middle times"),
    )
    rows = [
        (
            figures.name,
            *(f"{width.tok_s.median:.1f}" for width in (figures.auto, *figures.fixed)),
            *(f"{width.tok_s.median:.1f}" for width in figures.again),
            f"{figures.quotient:.3f} ({_block(figures.best.block)})",
            f"{figures.steady_quotient:.3f}",
        )
        for figures in report.sets
    ]
    return header, list(rows)


def _depths(report: DepthReport) -> tuple[Row, list[Row]]:
    header = (
        *("depth", "plain ms", "round ms", "draft", "verify", "tau", "plain tok/s", "spec. tok/s"),
        *("first token ms", "turn 2 cold", "warm", "warm/cold", "fed", "ids"),
    )
    rows = []
    for figures in report.depths:
        drafted = figures.drafted
        rows.append(
            (
                str(figures.depth),
                f"{figures.plain.round_ms:.1f}",
                _ms(drafted.round_ms if drafted else None),
                _ms(drafted.draft_ms if drafted else None),
                _ms(drafted.verify_ms if drafted else None),
                f"{figures.tau:.2f}" if drafted else "-",
                f"{figures.plain_tok_s:.1f}",
                f"{figures.speculative_tok_s:.1f}",
                f"{figures.first_token_ms:.0f}",
                f"{figures.second_turn_cold_ms:.0f}",
                f"{figures.second_turn_warm_ms:.0f}",
                f"{figures.warm_share:.1%}",
                str(figures.second_turn_fed),
                "equal" if figures.identical else "differ",
            )
        )
    return header, list(rows)


def _block(block: int | None) -> str:
    return "auto" if block is None else "plain" if block == 0 else str(block)


def _spread(spread: Spread, digits: int, ranged: bool) -> str:
    middle = f"{spread.median:.{digits}f}"
    return f"{middle} ({spread.low:.{digits}f}-{spread.high:.{digits}f})" if ranged else middle


def _split(split: Split) -> str:
    if split.other_ms is None:
        return f"{split.round_ms:.1f} ms"
    return (
        f"{split.round_ms:.1f} ms: draft {split.draft_ms:.1f}, verify {split.verify_ms:.1f}, "
        f"other {split.other_ms:.1f}"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _counts(counts: Sequence[tuple[int, int]]) -> str:
    """Which counts were drafted in what share of the rounds."""
    total = sum(rounds for _, rounds in counts)
    return "  ".join(f"{count} ids {rounds / total:.0%}" for count, rounds in counts)


def _trace(runs: Sequence[tuple[int, int]]) -> str:
    """Runs of one count as ``count*rounds``."""
    shown = " ".join(f"{count}*{rounds}" for count, rounds in runs[:_TRACE_RUNS])
    return shown + (" ..." if len(runs) > _TRACE_RUNS else "")
