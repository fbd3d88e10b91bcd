"""StatsPanel: acceptance in full, on demand; drawn from a summary, nothing computed here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from textual import events
from textual.content import Content
from textual.widgets import Static

from dflash_local.backend import MemoryFigures
from dflash_local.events import Usage
from dflash_local.stats import PositionRate, StatsSummary

from . import figures

MODES = ("off", "compact", "full")
FEW = 8
"""Rounds below which a rate is shown dim: too few to mean much."""
WIDE = 110
"""Columns from which the panel takes its own room instead of lying over the chat."""
NARROW = 60
"""Columns below which its columns stand below each other."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class PanelValues:
    """What the panel tells."""

    summary: StatsSummary = StatsSummary()  # noqa: RUF009 - frozen
    tok_s: float = 0.0
    plain_tok_s: float | None = None
    estimated: bool = True
    memory: MemoryFigures | None = None
    parked: bool = False
    usage: Usage | None = None


def bar(share: float, width: int = 20, *, ascii_only: bool = False) -> str:
    """A bar for 0 to 1, in eighths of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if ascii_only:
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def panel(values: PanelValues, mode: str, width: int, *, ascii_only: bool = False) -> Content:
    """The panel's lines."""
    if mode == "compact":
        return Content("\n").join(_head(values))
    summary = values.summary
    if width < NARROW:
        columns = [*_positions(summary, 10, ascii_only), *_histogram(summary, 10, ascii_only)]
        return Content("\n").join([*_head(values), *_rest(values), *columns])
    if width < WIDE:  # short bars, so that the columns still stand side by side
        positions = _positions(summary, 10, ascii_only)
        columns = _beside(positions, _histogram(summary, 10, ascii_only), 28)
        return Content("\n").join([*_head(values), *_rest(values), *columns])
    left = [*_head(values), *_positions(summary, 20, ascii_only)]
    right = [*_histogram(summary, 16, ascii_only), *_rest(values)]
    return Content("\n").join(_beside(left, right, 60))


def _beside(left: list[Content], right: list[Content], column: int) -> list[Content]:
    return [
        Content.assemble(one.truncate(column, pad=True), " | ", two)
        for one, two in zip_longest(left, right, fillvalue=Content(""))
    ]


def _head(values: PanelValues) -> list[Content]:
    summary, plain = values.summary, values.plain_tok_s
    speed = f"speed   {values.tok_s:.1f} tok/s"
    if plain and summary.rounds:
        gain = figures.ratio(values.tok_s / plain, estimated=values.estimated)
        speed += f"   plain {plain:.1f}   {gain}"
    drafting = summary.rounds - summary.plain_rounds
    full = summary.full_blocks / drafting if drafting else 0.0
    accept = (
        f"accept  τ {summary.tau:.2f}  draft {100 * summary.draft_rate:.0f}%  "
        f"rounds {summary.rounds}  full blocks {100 * full:.0f}%"
    )
    return [Content(speed), Content(accept), *([Content(figures.PARKED)] if values.parked else [])]


def _positions(summary: StatsSummary, width: int, ascii_only: bool) -> list[Content]:
    return [_position(rate, width, ascii_only) for rate in summary.positions] or [
        Content("no drafted round yet")
    ]


def _position(rate: PositionRate, width: int, ascii_only: bool) -> Content:
    drawn = bar(rate.rate, width, ascii_only=ascii_only).ljust(width)
    text = f"d{rate.position:<2} {drawn} {100 * rate.rate:3.0f}%  n {rate.rounds}"
    return Content.styled(text, "dim" if rate.rounds < FEW else "")


def _histogram(summary: StatsSummary, width: int, ascii_only: bool) -> list[Content]:
    counts = list(enumerate(summary.histogram))[1:]
    if not counts:
        return []
    total, seen, median = sum(count for _, count in counts), 0, 0
    for size, count in counts:
        seen += count
        if seen * 2 >= total:
            median = size
            break
    most = max(count for _, count in counts)
    lines = [Content(f"tokens per round, median {median}")]
    for size, count in counts:
        drawn = bar(count / most if most else 0, width, ascii_only=ascii_only)
        lines.append(Content(f"{size:2} {drawn} {count}"))
    return lines


def _rest(values: PanelValues) -> list[Content]:
    lines = []
    summary, memory, usage = values.summary, values.memory, values.usage
    if summary.draft_ms is not None and summary.verify_ms is not None and summary.decode_ms:
        draft = 100 * summary.draft_ms / summary.decode_ms
        verify = 100 * summary.verify_ms / summary.decode_ms
        other = max(0.0, 100 - draft - verify)
        lines.append(f"time  draft {draft:.0f}%  verify {verify:.0f}%  other {other:.0f}%")
    if memory is not None and memory.peak:
        parts = (memory.weights, memory.draft, memory.cache, memory.peak)
        weights, draft_, cache, peak = map(figures.gigabytes, parts)
        of = f" of {figures.gigabytes(memory.total)}" if memory.total else ""
        lines.append(f"memory  weights {weights}  draft {draft_}  kv {cache}  peak {peak}{of}")
    if usage is not None:
        lines.append(
            f"prefill  {figures.count(usage.prompt_tokens)} tok in "
            f"{figures.seconds(usage.prefill_ms / 1000)}, "
            f"{figures.count(usage.reused_tokens)} reused"
        )
    return [Content(line) for line in lines]


class StatsPanel(Static):
    """Shows ``PanelValues``; hidden while its mode is off."""

    DEFAULT_CSS = """
    StatsPanel {
        height: auto; max-height: 50%; padding: 0 1; display: none;
        background: $panel; color: $text; overflow-y: auto;
    }
    StatsPanel.shown { display: block; }
    """

    def __init__(self, mode: str = "off", *, ascii_only: bool = False) -> None:
        super().__init__()
        self._ascii = ascii_only
        self._values = PanelValues()
        self.mode = mode if mode in MODES else "off"
        self.set_class(self.mode != "off", "shown")

    def cycle(self) -> str:
        """Off, compact, full, off."""
        self.mode = MODES[(MODES.index(self.mode) + 1) % len(MODES)]
        self.set_class(self.mode != "off", "shown")
        self.show(self._values)
        return self.mode

    def show(self, values: PanelValues) -> None:
        """Draw it anew, if it is seen."""
        self._values = values
        if self.mode != "off":
            drawn = panel(values, self.mode, self.app.size.width, ascii_only=self._ascii)
            self.update(Content(figures.in_ascii(drawn.plain)) if self._ascii else drawn)

    def on_resize(self, event: events.Resize) -> None:
        """Fit into the new width."""
        self.show(self._values)
