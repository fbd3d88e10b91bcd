"""The bench's figures, counted on scripts; its tables and its picture."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dflash_local import bench_plot
from dflash_local.backend import Proposal, Verdict
from dflash_local.backends.scripted import ByteTokenizer, ScriptedBackend, open_scripted
from dflash_local.bench import first_difference, loops, run
from dflash_local.bench_depth import run_depths
from dflash_local.bench_prompts import SETS, chosen
from dflash_local.bench_setup import Spread
from dflash_local.bench_sweep import SetFigures, WidthFigures, _middle_times, _width, run_sweep
from dflash_local.bench_topics import TOPICS
from dflash_local.bench_view import Report, as_json, as_text
from dflash_local.engine import Engine
from dflash_local.errors import OptionError
from dflash_local.reply import Reply
from dflash_local.sampling import SamplingParams

REPLY = "".join(chr(97 + (i * i) % 23) for i in range(200))


def opened(accepts: tuple[int, ...] = (2, 0), **settings: Any) -> Engine:
    return Engine(partial(open_scripted, (REPLY,), accepts=accepts, block_size=4, **settings))


def test_five_topics_of_ten_prompts_that_differ() -> None:
    assert list(TOPICS) == ["chat", "code", "maths", "summarise", "languages"]
    texts = [text for name in TOPICS for _, text in SETS[name]]
    assert len(texts) == len(set(texts)) == 50
    assert {kind for kind, _ in chosen(10, *TOPICS)} == set(TOPICS)
    assert not {text for _, text in SETS["all"]} & set(texts)


def test_the_figures_of_a_script() -> None:
    with opened() as engine:
        report = run(engine, chosen(2, "chat", "code"), max_tokens=41, block=4, repeats=3)
    assert report.identical
    assert not report.repetitive
    assert report.plain.tokens == report.speculative.tokens == 4 * 40
    assert report.tau == pytest.approx(2.0, abs=0.1)
    assert [round(p.rate, 1) for p in report.positions] == [0.5, 0.5, 0.0]
    assert [kind.kind for kind in report.kinds] == ["chat", "code"]
    assert report.setup.prompt_count == 4
    assert dict(report.setup.versions).keys() >= {"dflash-local", "python"}
    for spread in (report.ratio, report.plain.tok_s, report.first_token_ms):
        assert 0 < spread.low <= spread.median <= spread.high
    for runs in report.widths:
        assert all(left != right for (left, _), (right, _) in pairwise(runs))
    assert {count for count, _ in report.drafted_counts} <= {0, 1, 2, 3}
    assert sum(rounds for _, rounds in report.drafted_counts) == pytest.approx(4 * 20, abs=4)


def test_time_is_split_into_draft_verify_and_the_rest() -> None:
    with opened(round_ms=2.0) as engine:
        report = run(engine, chosen(1, "chat"), max_tokens=9, block=4)
    assert report.plain_split.round_ms >= 2.0
    assert report.split is not None
    assert report.split.other_ms is None  # a script does not tell its parts
    assert report.process_peak > 2**20 or sys.platform == "win32"


class Wrong(ScriptedBackend):
    """Verifies so that a block's second id is another one than a plain step's."""

    def __init__(self) -> None:
        inner, _ = open_scripted((REPLY,), accepts=(1,), block_size=4)
        self.__dict__.update(inner.__dict__)

    def verify(self, proposal: Proposal) -> Verdict:
        verdict: Verdict = super().verify(proposal)
        return replace(verdict, next=65) if len(verdict.drafted) == 3 else verdict


def test_a_difference_is_found_once_with_its_margin() -> None:
    with Engine(lambda: (Wrong(), ByteTokenizer())) as engine:
        report = run(engine, chosen(2, "chat"), max_tokens=20, block=4, repeats=2)
    assert [(d.prompt, d.position, d.margin) for d in report.differences] == [
        (0, 2, 1.0),
        (1, 2, 1.0),
    ]
    assert "prompt 1 differs from token 2 on" in as_text(report)


def test_first_difference_and_loops() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert loops([9, *[1, 2, 3] * 8])
    assert not loops([1, 2, 3] * 4)
    assert not loops(list(range(40)))


def test_a_spread_is_a_median_between_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0]) == Spread(1.0, 1.0, 1.0)


def test_a_sweep_counts_plain_decoding_among_the_fixed_widths() -> None:
    with opened(accepts=(0,), round_ms=1.0, draft_ms=3.0) as engine:
        report = run_sweep(engine, {n: chosen(1, n) for n in ("chat", "code")}, max_tokens=16)
    (chat, code) = report.sets
    assert [width.block for width in chat.fixed] == [0, 2, 3, 4]
    # Drafts that are never accepted only cost: plain decoding wins, and is what auto meets again.
    assert chat.best.block == 0
    auto, best = chat.again
    assert (auto.block, best.block) == (None, 0)
    assert chat.quotient == auto.tok_s.median / best.tok_s.median
    assert code.auto.block is None


def test_the_best_width_is_the_one_that_met_auto_again() -> None:
    def width(block: int | None, steady: float) -> WidthFigures:
        return WidthFigures(block, Spread.of([steady + 1.0]), 2.0, steady)

    # With the second run's rounds counted in, another width looks best.
    fixed = (width(0, 10.0), width(2, 21.0), width(3, 20.0))
    figures = SetFigures("chat", width(None, 19.0), fixed, (width(None, 18.0), width(3, 20.0)))
    assert figures.best is fixed[2]
    assert figures.steady_quotient == 18.0 / 20.0
    assert figures.quotient == 19.0 / 21.0


def test_auto_meets_the_best_width_as_often_as_asked() -> None:
    steps = []
    with opened(accepts=(3,), round_ms=1.0) as engine:
        report = run_sweep(
            engine,
            {n: chosen(2, n) for n in ("chat", "code")},
            max_tokens=16,
            repeats=3,
            progress=lambda done, total: steps.append((done, total)),
        )
    assert [figures.best.block for figures in report.sets] == [4, 4]
    assert [figures.again[1].block for figures in report.sets] == [4, 4]
    assert steps == sorted(steps)
    assert steps[-1] == (16, 16), "four prompts, once in all widths and three times in two"


def test_a_stall_of_the_machine_does_not_touch_the_steady_figure() -> None:
    with opened() as engine:
        reply = engine.complete("x", SamplingParams(max_tokens=40), block=4)

    def taking(times: Sequence[float]) -> Reply:
        rounds = [replace(r, wall_ms=ms) for r, ms in zip(reply.rounds, times, strict=True)]
        return replace(reply, rounds=tuple(rounds))

    even = [10.0 + 2.0 * round_.drafted for round_ in reply.rounds]
    replies = [taking(even), taking(even), taking([900.0, *even[1:]])]
    middle = _middle_times([[[replies]]])
    tokens = sum(len(round_.tokens) for round_ in reply.rounds)
    for answered in replies:
        steady = _width(4, [[answered]], middle).steady_tok_s
        assert steady == pytest.approx(1000.0 * tokens / sum(even))


def test_a_second_turn_feeds_only_what_is_new_at_every_depth() -> None:
    with opened(token_ms=0.02) as engine:
        report = run_depths(engine, (300, 900), max_tokens=24, block=4)
    for depth, figures in zip((300, 900), report.depths, strict=True):
        assert 0.9 * depth < figures.depth <= depth
        assert figures.identical
        assert figures.second_turn_fed < 60
        assert figures.tau > 1.5
    deep = report.depths[1]
    assert deep.warm_share < 0.3  # 36 of 958 tokens are fed


def test_a_depth_needs_room() -> None:
    with opened(context=512) as engine, pytest.raises(OptionError, match="Give --context"):
        run_depths(engine, (600,), max_tokens=24)


def test_every_report_reads_as_text_markdown_and_json() -> None:
    with opened() as engine:
        reports: list[Report] = [
            run(engine, chosen(1, "chat", "code"), max_tokens=12, repeats=2),
            run_sweep(engine, {"chat": chosen(1, "chat")}, max_tokens=12),
            run_depths(engine, (200,), max_tokens=12),
        ]
    for report in reports:
        values = json.loads(json.dumps(as_json(report)))
        assert values["model"] == "scripted target"
        assert values["versions"]["python"]
        text, markdown = as_text(report), as_text(report, markdown=True)
        assert report.setup.prompts in text
        table = [line for line in markdown.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in table}) == 1
        assert re.match(r"\| ---", table[1])


def test_a_missing_matplotlib_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_plot, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'dflash-local\[plot\]'"):
        bench_plot.check(Path("out.png"))


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs the extra plot")
def test_every_report_becomes_a_picture(tmp_path: Path) -> None:
    with opened() as engine:
        reports: list[Report] = [
            run(engine, chosen(1, "chat", "code"), max_tokens=12, repeats=2),
            run_sweep(engine, {"chat": chosen(1, "chat")}, max_tokens=12),
            run_depths(engine, (200, 300), max_tokens=12),
        ]
    for number, report in enumerate(reports):
        path = tmp_path / f"{number}.png"
        bench_plot.check(path)
        bench_plot.draw(report, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000
