"""A picture of a bench; needs matplotlib, which comes with the extra ``plot``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_local.bench import BenchReport
from dflash_local.bench_depth import DepthReport
from dflash_local.bench_sampling import SampledReport
from dflash_local.bench_setup import Spread
from dflash_local.bench_sweep import SweepReport
from dflash_local.bench_view import Report
from dflash_local.errors import OptionError, how_to_install

_SUFFIXES = (".png", ".svg", ".pdf")
_PLAIN, _DRAFTED = "#8a8f98", "#1f77b4"


def check(path: Path) -> None:
    """Find out before a long bench whether its picture can be drawn.

    Raises:
        OptionError: matplotlib or the folder is missing, or the name has no known ending.
    """
    if find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib.", how_to_install("plot"))
    if path.suffix.lower() not in _SUFFIXES:
        raise OptionError(
            f"--plot {path.name} is no name of a picture.", f"End it in {', '.join(_SUFFIXES)}."
        )
    if not path.absolute().parent.is_dir():
        raise OptionError(f"There is no folder {path.parent}.", "Make it first.")


def draw(report: Report, path: Path) -> None:
    """Write the picture of a report."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    setup = report.setup
    figure.suptitle(
        f"{setup.model} + {setup.draft}, {setup.dtype}, {setup.processor or setup.device}",
        fontsize="small",
    )
    if isinstance(report, BenchReport):
        _bench(report, left, right)
    elif isinstance(report, SweepReport):
        _sweep(report, left, right)
    elif isinstance(report, DepthReport):
        _depths(report, left, right)
    else:
        _sampled(report, left, right)
    figure.savefig(path, dpi=150)


def _bench(report: BenchReport, left: Any, right: Any) -> None:
    plain = [*(kind.plain.tok_s for kind in report.kinds), report.plain.tok_s]
    drafted = [*(kind.speculative.tok_s for kind in report.kinds), report.speculative.tok_s]
    for spreads, offset, name, colour in (
        (plain, -0.2, "plain", _PLAIN),
        (drafted, 0.2, "speculative", _DRAFTED),
    ):
        places = [index + offset for index in range(len(spreads))]
        left.bar(
            places,
            [spread.median for spread in spreads],
            0.4,
            yerr=_errors(spreads),
            label=name,
            color=colour,
        )
    names = [*(kind.kind for kind in report.kinds), "all"]
    left.set_xticks(range(len(names)), names, rotation=30, ha="right")
    left.set_ylabel("tok/s")
    left.legend()
    right.bar(
        [position.position for position in report.positions],
        [position.rate for position in report.positions],
        color=_DRAFTED,
    )
    right.set_ylim(0.0, 1.0)
    right.set_xlabel("position in the block")
    right.set_ylabel("accepted")


def _sweep(report: SweepReport, left: Any, right: Any) -> None:
    for figures in report.sets:
        widths = [max(1, width.block or 0) for width in figures.fixed]
        left.plot(widths, [w.tok_s.median for w in figures.fixed], "o-", label=figures.name)
    left.set_xlabel("rows of a verify (1 is plain decoding)")
    left.set_ylabel("tok/s")
    left.legend()
    right.bar(
        [figures.name for figures in report.sets],
        [figures.quotient for figures in report.sets],
        color=_DRAFTED,
    )
    right.axhline(1.0, color=_PLAIN)
    right.set_ylabel("auto / best fixed width")
    right.tick_params(axis="x", rotation=30)


def _depths(report: DepthReport, left: Any, right: Any) -> None:
    depths = [figures.depth for figures in report.depths]
    left.plot(depths, [f.plain.round_ms for f in report.depths], "o-", color=_PLAIN, label="plain")
    drafted = [f for f in report.depths if f.drafted is not None]
    left.plot(
        [f.depth for f in drafted],
        [f.drafted.round_ms for f in drafted if f.drafted is not None],
        "o-",
        color=_DRAFTED,
        label="speculative",
    )
    left.set_xlabel("tokens of context")
    left.set_ylabel("ms per round")
    left.legend()
    right.plot(depths, [figures.tau for figures in report.depths], "o-", color=_DRAFTED)
    right.set_xlabel("tokens of context")
    right.set_ylabel("tokens per round")


def _sampled(report: SampledReport, left: Any, right: Any) -> None:
    names = [way.name for way in report.ways]
    for axis, values, label in (
        (left, [way.tok_s for way in report.ways], "tok/s"),
        (right, [way.tau for way in report.ways], "tokens per round"),
    ):
        axis.barh(names, values, color=[_PLAIN, *[_DRAFTED] * (len(names) - 1)])
        axis.invert_yaxis()
        axis.set_xlabel(label)
    right.set_yticklabels([])


def _errors(spreads: list[Spread]) -> list[list[float]]:
    below = [spread.median - spread.low for spread in spreads]
    return [below, [spread.high - spread.median for spread in spreads]]
