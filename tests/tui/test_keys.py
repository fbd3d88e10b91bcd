"""Every key of the chat, idle and while a reply is written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.content import Content

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.chat import Conversation
from dflash_local.text import ThinkTags
from dflash_local.tui import clipboard
from dflash_local.tui.app import Options
from dflash_local.tui.commands import REGISTRY
from dflash_local.tui.dialogs import ChooseDialog, TextDialog
from dflash_local.tui.goodbye import Given, say_goodbye
from dflash_local.tui.reply import Reply
from dflash_local.tui.tint import TintView
from dflash_local.tui.transcript import UserMessage
from tests.tui.driver import chat

LONG = ScriptedOpener(("word " * 4000,), accepts=(2,), round_ms=10)
TWO = ScriptedOpener(("First.", "Second."), round_ms=2)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []

    def copy(text: str, _: object) -> str:
        texts.append(text)
        return "to the clipboard"

    monkeypatch.setattr(clipboard, "copy", copy)
    return texts


async def test_shift_enter_and_ctrl_j_are_new_lines() -> None:
    async with chat() as driver:
        await driver.pilot.press("a", "ctrl+j", "b", "shift+enter", "c", "enter")
        await driver.idle()
        assert driver.screen.chat.conversation.turns[0].current.user == "a\nb\nc"


async def test_enter_while_generating_queues_and_up_takes_it_back() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.send("later")
        assert len(driver.screen.queued) == 1
        assert "queued" in driver.words()
        await driver.pilot.press("up")
        await driver.pilot.pause()
        assert not driver.screen.queued
        assert driver.screen.prompt.text == "later"
        await driver.pilot.press("ctrl+j", "x")
        assert driver.screen.prompt.text == "later\nx"


async def test_what_waits_or_is_half_written_is_told_on_leaving(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.send("later")
        await driver.pilot.press("h", "a", "l", "f")
        screen = driver.screen
        driver.app.exit()
        await driver.gone()
    say_goodbye(screen.session, None, "demo", Given(), screen.unsent)
    assert capsys.readouterr().out.splitlines()[:2] == ["Not sent: later", "Not sent: half"]


async def test_ctrl_d_behind_a_text_says_why_it_does_not_leave() -> None:
    async with chat() as driver:
        await driver.pilot.press("a", "b", "left", "ctrl+d")
        assert driver.screen.prompt.text == "a"
        assert not driver.told("Ctrl+D quits")
        await driver.pilot.press("ctrl+d")
        assert driver.told("Ctrl+D quits where the prompt is empty")
        await driver.pilot.press("ctrl+u", "ctrl+d")
        await driver.gone()


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_stopping_ends_within_a_round_and_the_next_key_works(key: str) -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.pilot.press(key)
        await driver.idle()
        answer = driver.replies()[0].answer
        assert answer is not None
        assert answer.end == "cancelled"
        assert ("word " * 4000).startswith(answer.text)
        assert answer.text
        await driver.pilot.press("h", "i")
        assert driver.screen.prompt.text == "hi"


async def test_escape_in_a_dialog_closes_only_the_dialog() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.pilot.press("f1")
        await driver.pilot.pause()
        assert isinstance(driver.app.screen, TextDialog)
        await driver.pilot.press("escape")
        await driver.pilot.pause()
        assert driver.app.screen is driver.screen
        assert driver.screen.generating
        await driver.pilot.press("ctrl+p")
        await driver.pilot.pause()
        assert isinstance(driver.app.screen, CommandPalette)
        await driver.pilot.press("escape")
        await driver.pilot.pause()
        assert driver.screen.generating


async def test_escape_closes_completions_before_it_stops() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.pilot.press("/", "c")
        await driver.pilot.pause()
        assert "/copy" in driver.words()
        await driver.pilot.press("escape")
        await driver.pilot.pause()
        assert driver.screen.generating
        await driver.pilot.press("escape")
        await driver.idle()


async def test_escape_twice_where_the_setting_asks_for_it() -> None:
    async with chat(LONG) as driver:
        driver.screen.settings.esc_twice = True
        await driver.send("go")
        await driver.generating()
        await driver.pilot.press("escape")
        await driver.pilot.pause()
        assert driver.screen.generating
        await driver.pilot.press("escape")
        await driver.idle()


async def test_ctrl_c_twice_quits_in_mid_answer_too() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.pilot.press("ctrl+c", "ctrl+c")
        await driver.pilot.pause()
        assert driver.app._exit


async def test_ctrl_c_copies_a_selection_when_idle(copied: list[str]) -> None:
    async with chat() as driver:
        driver.screen.prompt.set_text("some text")
        driver.screen.prompt.select_all()
        await driver.pilot.press("ctrl+c")
        await driver.pilot.pause()
        assert copied == ["some text"]
        assert not driver.app._exit


async def test_ctrl_d_deletes_then_quits() -> None:
    async with chat() as driver:
        await driver.pilot.press("a", "b", "left", "ctrl+d")
        await driver.pilot.pause()
        assert driver.screen.prompt.text == "a"
        await driver.pilot.press("backspace", "ctrl+d")
        await driver.pilot.pause()
        assert driver.app._exit


async def test_ctrl_l_begins_anew_and_undo_brings_the_old_chat_back() -> None:
    async with chat(TWO) as driver:
        await driver.say("hi")
        old = driver.screen.session.path
        await driver.pilot.press("ctrl+l")
        await driver.pilot.pause()
        assert not driver.replies()
        await driver.send("/undo")
        await driver.until(lambda: driver.replies())
        assert driver.screen.session.path == old
        await driver.until(lambda: "First." in driver.words())


async def test_ctrl_l_is_refused_while_generating() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.pilot.press("ctrl+l")
        await driver.pilot.pause()
        assert driver.screen.generating
        await driver.until(lambda: driver.told("Stop it first"))


async def test_ctrl_r_regenerates_and_the_earlier_answer_is_one_key_away() -> None:
    async with chat(ScriptedOpener(("Same.",))) as driver:
        await driver.say("hi")
        await driver.pilot.press("ctrl+r")
        await driver.idle()
        (turn,) = driver.screen.chat.conversation.turns
        assert len(turn.versions) == 2
        usage = turn.versions[1].answer.usage
        assert usage.reused_tokens == usage.prompt_tokens - 1
        assert len(driver.replies()) == 1
        assert "answer 2 of 2" in driver.words()
        await driver.pilot.press("alt+left")
        await driver.until(lambda: "answer 1 of 2" in driver.words())
        assert turn.shown == 0


async def test_ctrl_r_while_generating_stops_first() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.pilot.press("ctrl+r")
        await driver.until(lambda: len(driver.screen.chat.conversation.turns[0].versions) == 2)
        await driver.generating()
        first = driver.screen.chat.conversation.turns[0].versions[0].answer
        assert first is not None
        assert first.end == "cancelled"


async def test_ctrl_p_lists_the_actions() -> None:
    async with chat() as driver:
        await driver.pilot.press("ctrl+p")
        await driver.pilot.pause()
        await driver.pilot.press(*"race")
        await driver.until(lambda: "Race plain against speculative" in driver.words())


async def test_ctrl_o_opens_the_thinking() -> None:
    opener = ScriptedOpener(("<think>deep thoughts</think>Done.",), tags=ThinkTags())
    async with chat(opener) as driver:
        await driver.say("hi")
        assert "deep thoughts" not in driver.words()
        assert "thought" in driver.words()
        assert "tok" in driver.words()
        await driver.pilot.press("ctrl+o")
        await driver.until(lambda: "deep thoughts" in driver.words())
        assert driver.screen.chat.conversation.messages()[-1]["content"] == "Done."


async def test_ctrl_s_goes_through_the_panel() -> None:
    async with chat(TWO, size=(120, 50)) as driver:
        await driver.say("hi")
        await driver.pilot.press("ctrl+s")
        await driver.pilot.pause()
        assert "accept τ" in driver.words()
        await driver.pilot.press("ctrl+s")
        await driver.pilot.pause()
        assert "tokens per round" in driver.words()
        assert "d1" in driver.words()
        await driver.pilot.press("ctrl+s")
        await driver.pilot.pause()
        assert "tokens per round" not in driver.words()


@pytest.mark.parametrize("size", [(60, 24), (80, 24), (100, 30), (120, 40)])
async def test_the_panel_lies_over_the_chat_where_room_is_short(size: tuple[int, int]) -> None:
    async with chat(TWO, size=size) as driver:
        await driver.say("hi")
        height = driver.screen.transcript.size.height
        await driver.pilot.press("ctrl+s", "ctrl+s")
        await driver.until(lambda: "tokens per round" in driver.words())
        assert "d7" in driver.words()
        assert (driver.screen.transcript.size.height == height) == (size[0] < 110)
        assert "First." in driver.words()  # the newest text stays in sight
        assert "stopped by eos" in driver.words()


async def test_ctrl_t_tints_and_rounds_can_be_stepped_through() -> None:
    opener = ScriptedOpener(("Some words to colour.",), accepts=(3,))
    async with chat(opener) as driver:
        await driver.say("hi")
        await driver.pilot.press("ctrl+t")
        await driver.until(lambda: "draft accepted" in driver.words())
        assert "Some words to colour." in driver.words()
        await driver.pilot.press("alt+right")
        await driver.until(lambda: "round 1: 7 drafted, 3 accepted, 4 emitted" in driver.words())
        await driver.say("and again")
        assert driver.words().count("draft accepted") == 1  # one legend for all replies
        await driver.pilot.press("ctrl+t")
        await driver.pilot.pause()
        assert "correction" not in driver.words()


async def test_a_chat_that_was_reopened_is_tinted_as_before() -> None:
    opener = ScriptedOpener(("Some words to colour.",), accepts=(3,))
    drawn = []
    for resume in (False, True):
        async with chat(opener, options=Options(resume=resume)) as driver:
            if not resume:
                await driver.say("hi")
            await driver.until(lambda: driver.replies() and driver.replies()[0].answer is not None)
            await driver.pilot.press("ctrl+t")
            await driver.pilot.press("alt+right")
            await driver.until(
                lambda: "round 1: 7 drafted, 3 accepted, 4 emitted" in driver.words()
            )
            drawn.append(driver.replies()[0].query_one(TintView).content)
    assert isinstance(drawn[0], Content)
    assert len(drawn[0].spans) > 3
    assert drawn[0].spans == drawn[1].spans


async def test_ctrl_b_lists_the_sessions() -> None:
    async with chat(TWO) as driver:
        await driver.say("the first chat")
        await driver.pilot.press("ctrl+l")
        await driver.say("the second chat")
        await driver.pilot.press("ctrl+b")
        await driver.until(lambda: isinstance(driver.app.screen, ChooseDialog))
        assert "the first chat" in driver.words()
        await driver.pilot.press("down", "enter")
        await driver.until(lambda: driver.app.screen is driver.screen)
        turns = driver.screen.chat.conversation.turns
        assert len(turns) == 1


async def test_delete_twice_deletes_a_saved_chat_that_is_not_open() -> None:
    async with chat(TWO) as driver:
        for text in ("the first chat", "the second chat", "the third chat"):
            await driver.say(text)
            if text != "the third chat":
                await driver.pilot.press("ctrl+l")
        store, mine = driver.screen.store, driver.screen.session.path
        paths = store.newest()
        await driver.pilot.press("ctrl+b")
        await driver.until(lambda: isinstance(driver.app.screen, ChooseDialog))
        await driver.pilot.press("delete", "down", "delete")
        await driver.until(lambda: "Delete again" in driver.words())
        assert store.newest() == paths, "once is not enough, nor once on each of two"
        await driver.pilot.press("delete")
        await driver.until(lambda: len(store.newest()) == 2)
        assert "the second chat" not in driver.words()
        assert not list(store.folder.glob(f"{paths[1].stem}.*"))
        await driver.pilot.press("home", "delete", "delete")
        await driver.until(lambda: driver.told(f"{mine.stem} is open"))
        assert mine.is_file()


async def test_a_chat_open_in_another_window_is_refused_in_one_line() -> None:
    async with chat(TWO) as driver:
        await driver.say("here")
        mine = driver.screen.session
        other = driver.screen.store.create(Conversation(), "pair")
        other.user(0, 0, "there")
        os.utime(other.path, (0, 0))  # the last of the list
        for keys in (["enter"], ["down", "enter"]):
            await driver.pilot.press("ctrl+b")
            await driver.until(lambda: isinstance(driver.app.screen, ChooseDialog))
            await driver.pilot.press(*keys)
            await driver.until(lambda: driver.app.screen is driver.screen)
            if len(keys) == 2:
                await driver.until(lambda: driver.told("is open in another window"))
            assert driver.screen.session is mine
        other.close()


async def test_ctrl_g_edits_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "editor.py"
    script.write_text("import sys; f = open(sys.argv[1], 'a'); f.write(' and more'); f.close()")
    monkeypatch.setenv("VISUAL", f"{sys.executable} {script}")
    async with chat() as driver:
        driver.screen.prompt.set_text("text")
        from contextlib import nullcontext

        monkeypatch.setattr(driver.app, "suspend", nullcontext)
        await driver.pilot.press("ctrl+g")
        await driver.until(lambda: driver.screen.prompt.text == "text and more")


async def test_up_and_down_go_through_the_history() -> None:
    async with chat(TWO) as driver:
        await driver.say("one")
        await driver.say("two")
        await driver.pilot.press("x", "up")
        await driver.until(lambda: driver.screen.prompt.text == "two")
        await driver.pilot.press("up")
        await driver.until(lambda: driver.screen.prompt.text == "one")
        await driver.pilot.press("down", "down")
        await driver.until(lambda: driver.screen.prompt.text == "x")


async def test_scrolling_stays_put_and_end_follows_again() -> None:
    text = "\n\n".join(f"Paragraph {n}." for n in range(400))
    opener = ScriptedOpener((text,), accepts=(7,), round_ms=15)
    async with chat(opener, size=(80, 24)) as driver:
        transcript = driver.screen.transcript
        await driver.send("go")
        await driver.until(lambda: transcript.max_scroll_y > 40)
        await driver.pilot.press("pageup")
        await driver.until(lambda: not transcript.following)
        place, height = transcript.scroll_y, transcript.max_scroll_y
        await driver.until(lambda: transcript.max_scroll_y > height + 4)
        assert transcript.scroll_y == place
        assert "new text below" in driver.words()
        await driver.pilot.press("shift+up")
        await driver.until(lambda: transcript.scroll_y < place)
        await driver.pilot.press("end")
        await driver.until(lambda: transcript.following)
        await driver.until(lambda: transcript.scroll_y >= transcript.max_scroll_y - 2)
        assert "new text below" not in driver.words()
        await driver.pilot.press("pageup")
        await driver.until(lambda: not transcript.following)
        for _ in range(40):
            await driver.pilot.press("pagedown")
            if transcript.following:
                break
        assert transcript.following


async def test_alt_up_moves_through_messages_and_letters_act_on_them(copied: list[str]) -> None:
    code = "Look:\n\n```python\nprint(1)\n```\n"
    async with chat(ScriptedOpener((code, "Second."))) as driver:
        await driver.say("one")
        await driver.say("two")
        await driver.pilot.press("alt+up")
        await driver.pilot.pause()
        assert isinstance(driver.screen.focused, Reply)
        await driver.pilot.press("c")
        await driver.pilot.press("alt+up", "c", "alt+up", "y")
        await driver.pilot.pause()
        assert copied == ["Second.", "two", "print(1)\n"]
        old = driver.screen.session.path
        await driver.pilot.press("r")
        await driver.until(lambda: len(driver.screen.chat.conversation.turns) == 1)
        await driver.idle()
        await driver.until(lambda: driver.screen.chat.last is not None)
        assert driver.screen.session.path != old
        assert len(driver.screen.store.open(old).conversation.turns) == 2
        await driver.pilot.press("alt+up", "alt+up")
        assert isinstance(driver.screen.focused, UserMessage)
        await driver.pilot.press("escape")
        await driver.pilot.pause()
        assert driver.screen.focused is driver.screen.prompt


async def test_f1_shows_keys_commands_and_definitions() -> None:
    async with chat(size=(120, 120)) as driver:
        await driver.pilot.press("f1")
        await driver.until(lambda: isinstance(driver.app.screen, TextDialog))
        shown = driver.words()
        assert "Ctrl+R Regenerate the last reply" in shown
        assert "/copy [last|code|n|all]" in shown or "/copy last|code|n|all" in shown
        assert "tau: tokens emitted per round" in shown


async def test_edit_answers_the_last_turn_anew() -> None:
    async with chat(ScriptedOpener(("Reply.",))) as driver:
        await driver.say("one")
        await driver.send("/edit")
        assert driver.screen.prompt.text == "one"
        await driver.say("one more")
        (turn,) = driver.screen.chat.conversation.turns
        assert [version.user for version in turn.versions] == ["one", "one more"]
        assert len(driver.replies()) == 1


async def test_continue_goes_on_in_place() -> None:
    text = "word " * 60
    async with chat(ScriptedOpener((text,), accepts=(1,), round_ms=15)) as driver:
        await driver.send("go")
        await driver.generating()
        await driver.pilot.press("escape")
        await driver.idle()
        assert "/continue" in driver.words()
        await driver.say("/continue")
        answer = driver.screen.chat.last
        assert answer is not None
        assert answer.text == text
        assert answer.end == "stop"
        assert len(driver.replies()) == 1


async def test_an_opened_chat_tells_that_its_last_answer_can_go_on() -> None:
    opener = ScriptedOpener(("word " * 60,))
    for resume, hinted in ((False, True), (True, True), (True, False)):
        async with chat(opener, options=Options(resume=resume)) as driver:
            if not resume:
                await driver.say("/set max 3")
                await driver.say("go")
            assert ("/continue goes on from here." in driver.words()) == hinted
            if resume and hinted:
                await driver.say("/set max off")
                await driver.say("/continue")


def test_ids_keys_and_slash_names_are_single() -> None:
    keys = [(a.where, key) for a in REGISTRY.actions if a.keys for key in a.keys.split(",")]
    assert len(keys) == len(set(keys))
    slashes = [a.slash for a in REGISTRY.actions if a.slash]
    assert len(slashes) == len(set(slashes))
