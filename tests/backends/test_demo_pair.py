"""End to end on the real demo pair: the ids of plain decoding, by the draft, through every door."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dflash_local import Done, Engine, Round, SamplingParams, Text
from dflash_local.bench import run as run_bench
from dflash_local.bench_prompts import chosen

pytestmark = pytest.mark.slow
pytest.importorskip("torch")


def test_the_bench_finds_identical_ids_and_a_draft_that_helps(demo_engine: Engine) -> None:
    report = run_bench(demo_engine, chosen(2), max_tokens=32, block=8)
    assert report.identical
    assert report.tau > 1.4
    assert report.positions[0].rate > 0.4
    assert report.plain.tokens == report.speculative.tokens


def test_the_readmes_loop(demo_engine: Engine) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    shown, rounds = "", 0
    # A fixed block: on a busy machine the width control may find that drafting does not pay.
    for event in demo_engine.stream(messages, SamplingParams(max_tokens=64), block=8):
        if isinstance(event, Text):
            shown += "".join(piece.text for piece in event.pieces)
        elif isinstance(event, Round):
            rounds += 1
            assert event.drafted > 0
        elif isinstance(event, Done):
            assert event.reason in ("stop", "length")
            assert rounds < event.usage.completion_tokens
    assert "Paris" in shown


def test_a_second_turn_is_read_from_the_cache_and_answers_the_same(demo_engine: Engine) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    first = demo_engine.complete(messages, SamplingParams(max_tokens=24))
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Name another one."},
    ]
    warm = demo_engine.complete(messages, SamplingParams(max_tokens=24))
    cold = demo_engine.complete(messages, SamplingParams(max_tokens=24), reuse=False)
    assert warm.usage.reused_tokens > first.usage.prompt_tokens
    assert cold.usage.reused_tokens == 0
    assert warm.tokens == cold.tokens


def test_stop_strings_and_the_limit(demo_engine: Engine) -> None:
    text = demo_engine.complete("Count from one to ten.", SamplingParams(max_tokens=40)).text
    stop = text[12:15]
    cut = demo_engine.complete(
        "Count from one to ten.", SamplingParams(max_tokens=40, stop=(stop,))
    )
    assert cut.reason == "stop_string"
    assert cut.text == text[: text.index(stop)]
    short = demo_engine.complete("Count from one to ten.", SamplingParams(max_tokens=5))
    assert (short.reason, len(short.tokens)) == ("length", 5)


def test_the_command_line(demo_engine: Engine) -> None:
    argv = [sys.executable, "-m", "dflash_local", "generate", "--model", "demo", "Say hello."]
    done = subprocess.run(
        [*argv, "--json", "--max-tokens", "12", "--backend", "torch", "--block", "4"],
        capture_output=True,
        text=True,
        check=True,
    )
    reply = json.loads(done.stdout)
    assert reply["text"]
    assert reply["stats"]["drafted"] > 0
    assert done.stderr == ""
