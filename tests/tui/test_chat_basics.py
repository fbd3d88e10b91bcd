"""The first things a user does: read, send, stop, send again, leave."""

from __future__ import annotations

import pytest

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.tui.key_line import key_line
from tests.tui.driver import chat

LONG = ScriptedOpener(("word " * 3000,), accepts=(2,), round_ms=10)


async def test_a_message_is_answered_and_figures_are_shown() -> None:
    async with chat(ScriptedOpener(("Hello, **you**.",), round_ms=5)) as driver:
        await driver.say("hi")
        shown = driver.words()
    assert "hi" in shown
    assert "Hello, you." in shown
    assert "drafts accepted" in shown
    assert "stopped by eos" in shown
    assert "tok/s" in shown
    assert "τ" in shown


async def test_a_message_sent_while_loading_is_answered_afterwards() -> None:
    async with chat(ScriptedOpener(load_ms=800), wait=False) as driver:
        await driver.send("early")
        assert "Loading" in driver.words()
        await driver.ready()
        await driver.until(lambda: driver.replies() and driver.replies()[0].answer)
        assert "Hello." in driver.words()


async def test_escape_stops_and_keeps_the_partial_reply() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.pilot.press("escape")
        await driver.idle()
        answer = driver.replies()[0].answer
        assert answer is not None
        assert answer.end == "cancelled"
        assert answer.text.startswith("word word")
        assert "stopped by you" in driver.words()


async def test_a_queued_message_is_sent_when_the_answer_ends() -> None:
    async with chat(ScriptedOpener(("one " * 40, "two"), round_ms=10)) as driver:
        await driver.send("first")
        await driver.send("second")
        await driver.until(lambda: len(driver.replies()) == 2)
        await driver.idle()
        assert [r.answer.text for r in driver.replies() if r.answer] == ["one " * 40, "two"]


async def test_ctrl_c_twice_quits() -> None:
    async with chat() as driver:
        await driver.pilot.press("ctrl+c")
        await driver.pilot.pause()
        assert "again to quit" in driver.words()
        await driver.pilot.press("ctrl+c")
        await driver.pilot.pause()
        assert not driver.app.is_running or driver.app._exit


async def test_a_failed_load_is_told() -> None:
    async with chat(ScriptedOpener(fail="The weights are cut short."), wait=False) as driver:
        await driver.until(lambda: "cut short" in driver.words())
        assert "Pull it again." in driver.words()


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (160, 45)])
async def test_passing_words_cover_neither_the_newest_text_nor_the_lines_below(
    size: tuple[int, int],
) -> None:
    async with chat(ScriptedOpener(("Hello.",)), size=size, notifications=True) as driver:
        await driver.say("hi")
        driver.screen.tell("Copied the reply, 6 characters, to the clipboard.")
        await driver.until(lambda: "Copied the reply" in driver.words())
        shown = driver.words()
        assert "Hello." in shown
        assert "stopped by eos" in shown
        assert "tok/s" in driver.shown().splitlines()[-1]
        assert "Message, or /" in shown


async def test_the_key_line_is_never_cut() -> None:
    async with chat() as driver:
        for width in range(41, 160, 7):
            await driver.pilot.resize_terminal(width, 24)
            await driver.pilot.pause()
            assert driver.shown().splitlines()[-2].strip() == key_line(width - 2)
