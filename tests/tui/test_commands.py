"""Slash commands, completion, settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.service_wire import ServiceOpener
from dflash_local.tui.app import Options
from dflash_local.tui.commands import REGISTRY
from dflash_local.tui.race import RaceScreen
from dflash_local.tui.settings import SettingsError, load_settings, settings_file
from tests.tui.driver import chat


async def test_unknown_commands_name_the_nearest_and_are_never_sent() -> None:
    async with chat() as driver:
        await driver.send("/hlep")
        await driver.until(lambda: driver.told("Did you mean /help?"))
        assert driver.screen.prompt.text == "/hlep"
        assert not driver.screen.chat.conversation.turns
        await driver.say("//hlep")
        assert driver.screen.chat.conversation.turns[0].current.user == "/hlep"


async def test_figures_are_of_the_chat_on_the_screen() -> None:
    async with chat() as driver:
        line = driver.screen.status_line
        await driver.say("one")
        await driver.say("two")
        usage = driver.screen.chat.last.usage
        assert "tok/s" in str(line.render())
        await driver.send("/new")
        await driver.until(lambda: "ctx 0/" in str(line.render()))
        assert "tok/s" not in str(line.render())
        assert "ready" in str(line.render())
        await driver.send("/undo")
        held = usage.prompt_tokens + usage.completion_tokens
        await driver.until(lambda: f"ctx {held}/" in str(line.render()))
        await driver.send("/undo")
        await driver.until(lambda: f"ctx {held}/" not in str(line.render()))
        assert "tok/s" not in str(line.render())
        await driver.say("three")
        assert "tok/s" in str(line.render())


async def test_tab_completes() -> None:
    async with chat() as driver:
        await driver.pilot.press("/", "b", "e", "tab")
        await driver.pilot.pause()
        assert driver.screen.prompt.text == "/bench "


async def test_arrows_pick_a_command() -> None:
    async with chat() as driver:
        prompt, offered = driver.screen.prompt, driver.screen.completions
        await driver.pilot.press("/", *["down"] * 12)
        await driver.until(lambda: offered.picked is not None)
        twelfth = REGISTRY.complete("/")[11]
        assert offered.picked is twelfth
        assert twelfth.usage in driver.words()
        await driver.pilot.press("up", "enter")
        await driver.until(lambda: prompt.text == f"/{REGISTRY.complete('/')[10].slash} ")
        assert not driver.screen.chat.conversation.turns
        prompt.set_text("")
        await driver.pilot.press("/", "up", "tab")
        await driver.until(lambda: prompt.text == f"/{REGISTRY.complete('/')[-1].slash} ")


async def test_a_message_with_a_slash_comes_back_as_one() -> None:
    async with chat() as driver:
        await driver.say("//retry")
        for command in ("/edit", "/undo"):
            await driver.send(command)
            await driver.until(lambda: driver.screen.prompt.text == "//retry")


async def test_block_off_is_plain_decoding() -> None:
    async with chat(ScriptedOpener(("Hello.",))) as driver:
        await driver.send("/block off")
        await driver.say("hi")
        answer = driver.screen.chat.last
        assert answer is not None
        assert answer.stats is not None
        assert answer.stats.drafted == 0
        await driver.send("/block 99")
        await driver.until(lambda: driver.told("Not a block size"))


async def test_the_block_of_the_command_line_holds_from_the_first_answer_on() -> None:
    async with chat(options=Options(prompt="hello there", block=0)) as driver:
        await driver.until(lambda: driver.screen.chat.last is not None)
        answer = driver.screen.chat.last
        assert answer is not None
        assert answer.stats is not None
        assert answer.stats.drafted == 0


async def test_settings_of_the_chat() -> None:
    async with chat() as driver:
        await driver.send("/set max 3")
        await driver.say("hi")
        assert driver.screen.chat.last.text == "Hel"
        await driver.send("/set top_p 7")
        await driver.until(lambda: driver.told("top_p is 7"))
        await driver.send("/set repeat 1.1")
        await driver.until(lambda: driver.told("repeat is 1.1"))
        assert driver.screen.chat.options.sampling.repetition_penalty == 1.1
        await driver.send("/set nonsense 1")
        await driver.until(lambda: driver.told("no setting nonsense"))
        await driver.send("/system Be kind.")
        assert driver.screen.chat.conversation.messages()[0]["content"] == "Be kind."
        await driver.send("/think off")
        assert driver.screen.chat.options.thinking is False


@pytest.mark.parametrize("ending", ["md", "json"])
async def test_save_exports(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"chat.{ending}"
    async with chat() as driver:
        await driver.say("hi")
        await driver.send(f"/save {path}")
        await driver.until(path.exists)
        assert "Hello." in path.read_text()
        if ending == "json":
            assert json.loads(path.read_text())["messages"][0]["content"] == "hi"


async def test_the_race_judges_identical_ids() -> None:
    opener = ScriptedOpener(("A race of a few words.",), accepts=(3,), round_ms=5)
    async with chat(opener) as driver:
        await driver.say("go")
        await driver.send("/bench")
        await driver.until(lambda: isinstance(driver.app.screen, RaceScreen))
        screen = driver.app.screen
        assert isinstance(screen, RaceScreen)
        await driver.until(lambda: screen.verdict is not None)
        assert screen.verdict is not None
        assert screen.verdict.identical
        assert screen.verdict.ratio > 0
        await driver.until(lambda: driver.words().count("A race of a few words.") == 2)
        assert "identical ids" in driver.words()
        await driver.pilot.press("escape")
        await driver.until(lambda: driver.app.screen is driver.screen)
        await driver.until(lambda: not driver.screen.live.estimated)


async def test_the_model_can_be_switched_and_the_chat_goes_on() -> None:
    def openers(name: str) -> ServiceOpener:
        opener: ServiceOpener = ScriptedOpener((f"I am {name}.",))
        return opener

    async with chat() as driver:
        driver.screen.openers = openers
        await driver.say("hi")
        await driver.send("/model other")
        await driver.until(lambda: driver.screen.pair == "other")
        await driver.ready()
        await driver.say("who?")
        assert "I am other." in driver.words()
        assert len(driver.screen.chat.conversation.turns) == 2


async def test_the_first_run_offers_the_models() -> None:
    async with chat() as driver:
        await driver.send("/model")
        await driver.until(lambda: "this machine has" in driver.words())
        assert "demo" in driver.words()
        await driver.pilot.press("escape")


async def test_a_draft_that_does_not_help_is_told() -> None:
    opener = ScriptedOpener(("word " * 30,), accepts=(0,), round_ms=1)
    async with chat(opener) as driver:
        await driver.send("go")
        await driver.until(lambda: "draft is not helping" in driver.words())
        assert "/block off" in driver.words()


async def test_theme_and_keymap_persist() -> None:
    async with chat() as driver:
        await driver.send("/theme nord")
        await driver.until(lambda: driver.app.theme == "nord")
        driver.screen.settings.keymap = {"view.help": "f5"}
    async with chat() as driver:
        assert driver.app.theme == "nord"
        await driver.pilot.press("f5")
        await driver.until(lambda: driver.app.screen is not driver.screen)


async def test_enter_and_newline_swap() -> None:
    async with chat() as driver:
        await driver.send("/swap")
        await driver.pilot.press("a", "enter", "b", "ctrl+j")
        await driver.idle()
        assert driver.screen.chat.conversation.turns[0].current.user == "a\nb"
    assert load_settings().enter_sends is False


def test_damaged_settings_are_named() -> None:
    settings_file().parent.mkdir(parents=True)
    for content in ("{", "[]", '{"theme": 3}'):
        settings_file().write_text(content)
        with pytest.raises(SettingsError, match=r"chat\.json"):
            load_settings()


async def test_a_long_paste_is_folded_and_sent_whole() -> None:
    from textual import events

    pasted = "\n".join(f"line {n}" for n in range(500))
    async with chat() as driver:
        await driver.pilot.press("a", "space")
        driver.screen.prompt.post_message(events.Paste(pasted))
        await driver.until(lambda: "pasted" in driver.screen.prompt.text)
        assert driver.screen.prompt.text == "a [pasted 500 lines]"
        await driver.pilot.press("enter")
        await driver.idle()
        assert driver.screen.chat.conversation.turns[0].current.user == f"a {pasted}"


async def test_a_first_prompt_is_sent_at_the_start() -> None:
    async with chat(options=Options(prompt="hello there")) as driver:
        await driver.until(lambda: driver.screen.chat.last is not None)
        assert driver.screen.chat.conversation.turns[0].current.user == "hello there"


async def test_a_full_context_offers_room() -> None:
    long = "".join(chr(97 + (i * i) % 23) for i in range(300))
    async with chat(ScriptedOpener((long, "Short."), context=256)) as driver:
        await driver.say("a" * 60)
        assert driver.screen.chat.last is not None
        assert driver.screen.chat.last.end == "context"
        assert "The context is full" in driver.shown()
        await driver.send("/room")
        await driver.until(lambda: driver.told("no older turns"))
        await driver.say("b" * 20)
        assert "/room leaves" in driver.shown()
        await driver.send("/room")
        await driver.until(lambda: driver.told("The oldest turn is left out"))
        await driver.pilot.press("ctrl+r")
        await driver.until(lambda: driver.screen.chat.last.text, "for room")
        assert len(driver.screen.chat.conversation.turns) == 2
