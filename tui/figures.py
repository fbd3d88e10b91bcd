"""Figures in words: every number on screen and in plain mode is worded here, once."""

from __future__ import annotations

from dflash_local.chat import ENDS, Answer
from dflash_local.stats import StatsSummary


def count(number: int) -> str:
    """Short for a count: ``950``, ``2.1k``, ``32k``."""
    if number < 1000:
        return str(number)
    thousands = number / 1000
    return f"{thousands:.1f}k" if thousands < 10 else f"{thousands:.0f}k"


PARKED = "parked: drafting does not pay here"


def mostly_parked(stats: StatsSummary) -> bool:
    """Whether a draft was tried, and most rounds went without: its rates tell of few rounds."""
    return stats.drafted > 0 and 2 * stats.plain_rounds > stats.rounds


def counted(number: int, what: str) -> str:
    """``1 code block``, ``2 code blocks``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def turns(number: int, which: str = "") -> str:
    """``1 turn``, ``2 turns``, ``2 earlier turns``."""
    return counted(number, f"{which}turn")


def how_to_go_on(answer: Answer) -> str:
    """What can be done about an answer that was cut off; empty where it was not."""
    if answer.end == "context":
        return "The context is full: /continue leaves the oldest turns out and goes on."
    return "/continue goes on from here." if answer.can_go_on else ""


def gigabytes(size: int) -> str:
    """``9.8 GB``; sizes below 0.1 GB in MB."""
    return f"{size / 1e9:.1f} GB" if size >= 100e6 else f"{size / 1e6:.0f} MB"


def seconds(value: float) -> str:
    """``0.31 s``, ``4.1 s``, ``1 min 12 s``."""
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"


def speed(tok_s: float) -> str:
    """``142 tok/s``; one decimal below 10."""
    return f"{tok_s:.0f} tok/s" if tok_s >= 10 else f"{tok_s:.1f} tok/s"


def ratio(value: float, *, estimated: bool = False) -> str:
    """``3.1×``, with ``est.`` where the plain speed was not measured properly."""
    return f"{value:.1f}×{' est.' if estimated else ''}"


def footer(answer: Answer) -> str:
    """The line under a finished answer."""
    parts: list[str] = []
    if answer.usage is not None and answer.stats is not None:
        stats, usage = answer.stats, answer.usage
        parts.append(f"{len(answer.tokens) or usage.completion_tokens} tok")
        if stats.rounds:
            parts.append(speed(stats.tok_s))
        if stats.drafted:
            if answer.speedup:
                parts.append(ratio(answer.speedup, estimated=answer.estimated))
            if mostly_parked(stats):
                parts.append("drafting parked")
            else:
                parts.append(f"τ {stats.tau:.1f}")
                parts.append(f"{100 * stats.draft_rate:.0f}% drafts accepted")
        parts.append(f"first token {seconds(usage.prefill_ms / 1000)}")
    parts.append(ENDS[answer.end])
    return " · ".join(parts)


def sentence(answer: Answer) -> str:
    """The same as one sentence for people who listen to it."""
    if answer.usage is None or answer.stats is None:
        return f"The answer was {ENDS[answer.end]}."
    stats = answer.stats
    words = f"{answer.usage.completion_tokens} tokens"
    if stats.rounds:
        words += f" at {stats.tok_s:.0f} tokens per second"
    if mostly_parked(stats):
        words += ", drafting parked"
    elif stats.drafted:
        words += (
            f", {stats.tau:.1f} tokens per round, "
            f"{100 * stats.draft_rate:.0f} percent of drafts accepted"
        )
    return f"{words}, {ENDS[answer.end]}."


def in_ascii(text: str) -> str:
    """The same words for terminals and ears that know only ASCII."""
    return text.translate(
        {ord("τ"): "tau", ord("×"): "x", ord("·"): "-", ord("▸"): ">", ord("▾"): "v"}
    )
