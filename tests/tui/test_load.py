"""The screen keeps up with a fast model and the model does not notice the screen.

``measure`` prints the figures: ``python -m tests.tui.test_load``. The tests hold only bounds that
a loaded machine keeps as well.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from dataclasses import dataclass

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.chat import Answer, Conversation, Turn, Version
from dflash_local.events import Round
from dflash_local.service import Service
from tests.tui.driver import chat

LINES = [f"    total_{n} = items[{n}] + compute(x[{n}], 'value')  # step {n}" for n in range(700)]


def code(tokens: int) -> ScriptedOpener:
    """200 tokens a second of one code fence: 4 a round of 20 ms."""
    text = "```python\n" + "\n".join(LINES)[: tokens - 20] + "\n```\n"
    return ScriptedOpener((text,), accepts=(3,), round_ms=20)


@dataclass
class Figures:
    """What one run showed."""

    p95_ms: float
    worst_ms: float
    rounds_s: float
    seconds: float
    cpu_s: float


async def lag(samples: list[float]) -> None:
    """How late the loop is, every 10 ms."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.01)
        samples.append(1000 * (time.perf_counter() - began - 0.01))


async def with_screen(opener: ScriptedOpener, tokens: int) -> Figures:
    """Run an answer in the app."""
    async with chat(opener, size=(100, 30)) as driver:
        await driver.until(lambda: not driver.screen.loader.timing)
        samples: list[float] = []
        watch = asyncio.create_task(lag(samples))
        cpu, began = time.process_time(), time.perf_counter()
        await driver.screen.send("go")
        while driver.screen.generating:
            await asyncio.sleep(0.05)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        watch.cancel()
        summary = driver.screen.answering.stats.summary()
        last = driver.screen.chat.last
        assert last is not None
        assert last.usage is not None
        assert last.usage.completion_tokens >= tokens - 30
    samples.sort()
    return Figures(
        samples[int(0.95 * len(samples))],
        samples[-1],
        1000 * summary.rounds / summary.decode_ms,
        seconds,
        cpu_s,
    )


def without_screen(opener: ScriptedOpener) -> tuple[float, float]:
    """Rounds a second of decode time, and of wall time, of the service alone."""
    with Service(opener) as service:
        service.wait()
        rounds: list[Round] = []
        began = time.perf_counter()
        rounds = [event for event in service.stream("go") if isinstance(event, Round)]
        wall = time.perf_counter() - began
    return 1000 * len(rounds) / sum(r.wall_ms for r in rounds), len(rounds) / wall


def long_conversation(turns: int) -> Conversation:
    """Turns of six blocks each."""
    text = "# Title\n\nSome **text**.\n\n- one\n- two\n\n```python\nprint(1)\n```\n\nMore.\n\nEnd."
    return Conversation(
        turns=[Turn([Version(f"Question {n}?", Answer(text, "", "stop"))]) for n in range(turns)]
    )


async def resize_seconds(turns: int) -> float:
    """The slower of two resizes with a long chat."""
    async with chat(size=(100, 30)) as driver:
        await driver.screen.transcript.show(long_conversation(turns))
        await driver.pilot.pause()
        times = []
        for size in ((70, 24), (110, 40)):
            began = time.perf_counter()
            await driver.pilot.resize_terminal(*size)
            await driver.pilot.pause()
            times.append(time.perf_counter() - began)
    return max(times)


async def memory_growth(turns: int) -> tuple[int, int, int]:
    """Resident bytes after a quarter and all of the turns, and widgets mounted at the end."""
    async with chat(ScriptedOpener(("A **reply**.\n\n- [x] of\n- several blocks",))) as driver:
        quarter = 0
        for number in range(turns):
            await driver.say(f"Question {number}?")
            if number == turns // 4:
                quarter = resident()
        return quarter, resident(), len(driver.screen.query("*"))


def resident() -> int:
    """Bytes of this process in memory."""
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def test_code_at_speed_keeps_the_loop_responsive() -> None:
    figures = await with_screen(code(1000), 1000)
    assert figures.p95_ms < 250


async def test_resizing_a_long_chat_is_bounded() -> None:
    assert await resize_seconds(200) < 10


async def test_a_long_chat_mounts_a_window_and_scrolls_back() -> None:
    async with chat(size=(80, 24)) as driver:
        await driver.screen.transcript.show(long_conversation(200))
        await driver.pilot.pause()
        assert len(driver.screen.query("UserMessage")) == 10
        driver.screen.prompt.focus()
        for _ in range(100):
            await driver.pilot.press("pageup")
            if len(driver.screen.query("UserMessage")) > 10:
                break
        assert len(driver.screen.query("UserMessage")) == 15


async def test_earlier_turns_go_as_new_ones_come() -> None:
    async with chat(ScriptedOpener(("Reply.",))) as driver:
        for number in range(24):
            await driver.say(f"Question {number}?")
        assert len(driver.replies()) < 22
        assert "Reply." in driver.words()


async def measure() -> None:
    """Print the figures for the report."""
    alone, alone_wall = without_screen(code(4000))
    shown = await with_screen(code(4000), 4000)
    print(f"alone {alone:.2f} rounds/s (wall {alone_wall:.2f}), with the screen {shown}")
    print(f"ratio {shown.rounds_s / alone:.4f}, app CPU {100 * shown.cpu_s / shown.seconds:.0f} %")
    print(f"resize with 200 turns {await resize_seconds(200):.2f} s")
    quarter, end, widgets = await memory_growth(200)
    print(
        f"memory after 50 turns {quarter / 1e6:.0f} MB, 200 {end / 1e6:.0f} MB, {widgets} widgets"
    )


if __name__ == "__main__":
    asyncio.run(measure())
