from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_local import (
    DflashError,
    Done,
    Engine,
    SamplingParams,
    Text,
    acomplete,
    astream,
    demo,
    load,
)
from tests.support.chat_pair import chat_pair
from tests.support.two_threads import drive

API = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target, draft = chat_pair(tmp_path_factory.mktemp("pair"))
    with load(target, draft=draft, backend="torch", dtype="fp32", context=512, threads=1) as opened:
        yield opened


def test_two_threads_with_cancellation_equal_a_serial_run(engine: Engine) -> None:
    tally = drive(engine, 3.0)
    assert tally.errors == []
    assert tally.answers


async def test_astream_gives_what_stream_gives(engine: Engine) -> None:
    settings = SamplingParams(max_tokens=20)
    events = [event async for event in astream(engine, "abc", settings)]
    assert isinstance(events[-1], Done)
    reply = await acomplete(engine, "abc", settings)
    assert events[-1].tokens == reply.tokens


async def test_astream_left_early_or_cancelled_frees_the_engine(engine: Engine) -> None:
    async for event in astream(engine, "abc", SamplingParams(max_tokens=300)):
        if isinstance(event, Text):
            break

    async def endless() -> None:
        async for _ in astream(engine, "xyz", SamplingParams(max_tokens=300)):
            pass

    for endless_task in (endless(), acomplete(engine, "xyz", SamplingParams(max_tokens=300))):
        task = asyncio.ensure_future(endless_task)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await acomplete(engine, "abc", SamplingParams(max_tokens=5))).tokens


async def test_errors_reach_the_reader(engine: Engine) -> None:
    with pytest.raises(DflashError, match="no message"):
        async for _ in astream(engine, []):
            pass


@pytest.mark.slow
def test_the_examples_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    demo.ensure()
    text = API.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 10
    namespace: dict[str, object] = {"__name__": "examples"}
    for block in blocks:
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, str(API), "exec"), namespace)
    out = capsys.readouterr().out
    assert "Paris" in out
    assert "tau" in out
