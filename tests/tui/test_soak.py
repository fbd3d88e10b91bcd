"""A long evening in one go: many turns at a high rate with everything pressed in between.

Nothing may be lost, and nothing may grow: not the memory, not the widgets, not the lag.
"""

from __future__ import annotations

import asyncio
import gc
from statistics import median

import pytest
from textual.widget import Widget

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.chat import Conversation, Turn
from dflash_local.sessions import read
from tests.tui.driver import Driver, chat
from tests.tui.test_load import lag, resident

TURNS = 36
CHAT = 12
"""Turns of one chat; then a new one begins."""
PROSE = "Some **text** and `code` in a paragraph.\n\nThen another one, *to the end*.\n"
FENCE = f"{PROSE}\n```python\ntotal = items[0] + compute(x[0])\n```\n"
STOPPED, RETRIED, EDITED = (5, 9), (2, 7), (4, 10)
"""Turns of each chat with which that happens."""
LONG = f"{PROSE}\n{'word ' * 2000}"
REPLIES = tuple(
    LONG if place in STOPPED else FENCE if place % 4 == 0 else PROSE for place in range(CHAT)
)
SIZES = ((80, 24), (120, 40), (60, 15), (100, 30))


async def one_turn(driver: Driver, number: int) -> None:
    """Send, and now and then stop, regenerate, edit, resize and switch the views meanwhile."""
    screen, pilot = driver.screen, driver.pilot
    await driver.send(f"Question {number}?")
    if number % CHAT in STOPPED:
        await driver.generating(1)
        await pilot.press("pageup", "escape")
    if number % 3 == 0:
        await pilot.press("ctrl+s")
    if number % 6 == 1:
        await pilot.resize_terminal(*SIZES[number // 6 % len(SIZES)])
    if number % 5 == 2:
        await pilot.press("ctrl+t")
    await driver.idle()
    if number % CHAT in RETRIED:
        await pilot.press("ctrl+r")
        await driver.until(lambda: screen.generating or len(turns(driver)[-1].versions) > 1)
        await driver.idle()
    if number % CHAT in EDITED:
        await driver.send("/edit")
        await driver.say(f"Question {number} again?")


def turns(driver: Driver) -> list[Turn]:
    conversation: Conversation = driver.screen.chat.conversation
    return conversation.turns


def check_text(conversation: Conversation) -> None:
    """Every answer is whole, or the beginning of one that was stopped."""
    assert len(conversation.turns) == CHAT
    for turn, whole in zip(conversation.turns, REPLIES, strict=True):
        for version in turn.versions:
            answer = version.answer
            assert answer is not None
            assert answer.end in ("stop", "cancelled")
            assert answer.text == whole if answer.end == "stop" else whole.startswith(answer.text)


@pytest.mark.slow
async def test_nothing_is_lost_and_nothing_grows() -> None:
    lags: list[list[float]] = []
    memory, alive, mounted = [], [], []
    ends: list[str] = []
    async with chat(ScriptedOpener(REPLIES, accepts=(7, 5, 7), round_ms=2)) as driver:
        for number in range(TURNS):
            if number % CHAT == 0:
                lags.append([])
                watch = asyncio.create_task(lag(lags[-1]))
            await one_turn(driver, number)
            if number % CHAT == CHAT - 1:
                watch.cancel()
                conversation = driver.screen.chat.conversation
                check_text(conversation)
                saved, _ = read(driver.screen.session.path)
                assert saved == conversation
                ends += [v.answer.end for t in conversation.turns for v in t.versions if v.answer]
                mounted.append(len(driver.screen.query("*")))
                await driver.pilot.press("ctrl+l")
                await driver.until(lambda: not driver.replies())
                gc.collect()
                memory.append(resident())
                # Not all objects: Textual itself keeps up to 1024 drawing caches of gone widgets.
                alive.append(sum(isinstance(thing, Widget) for thing in gc.get_objects()))
    lag_ms = [median(samples) for samples in lags]
    print(f"RSS {[round(m / 1e6) for m in memory]} MB, widgets alive {alive}, mounted {mounted}")
    print(f"lag {[round(ms, 2) for ms in lag_ms]} ms, ends {len(ends)}")
    assert "cancelled" in ends
    assert ends.count("stop") > TURNS / 2
    assert max(mounted) < 2 * mounted[0]
    assert memory[-1] < memory[0] + 40_000_000
    assert alive[-1] <= alive[0] + 5
    assert lag_ms[-1] < 3 * lag_ms[0] + 20
