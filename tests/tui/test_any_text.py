"""Text that breaks apps, through every place that a string can reach: literal, and no crash."""

from __future__ import annotations

import pytest

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.chat import Answer, Conversation, Turn, Version
from dflash_local.sessions import read
from dflash_local.text import ThinkTags
from dflash_local.tui.dialogs import Choice, ChooseDialog, TextDialog
from dflash_local.tui.visible import visible
from tests.tui.driver import chat

NASTY = [
    '[0] [/] {"a": [true, false]}',
    "[/",
    "[bold",
    "[b unclosed [/some/path] x[0] [red]red[/red]",
    "a\x1b[31mb\x07c\x00d\x7fe\x9bf",
    "line one\rline two\x0bthree\x0cfour\u2028five\u2029six\x85seven",
    "family 👨‍👩‍👧‍👦 flag 🇩🇪 skin 👍🏽 zalgo a\u0301\u0302\u0303\u0304",
    "rtl \u202eevil\u202c and \u2066isolate\u2069 שלום مرحبا",
    "<div>html</div> <script>x</script> <b",
    "# [heading]\n\n## 🦊 !!\n\n| a | b |\n|---|---|\n| [x] | y |\n\n> quote [/]\n\n- [ ] item",
    "```python\nunclosed [fence]",
    "~~~\nother ``` fence\n",
    "![image](x) [link](javascript:alert(1)) <http://x.y/[z]>",
    "\\[ x^2 \\] $$y$$ &amp; &#0; &#x1b;",
    "``` \n```\n```\n[/]",
    "lone surrogate \ud800 here",
    "@click=app.quit() [@click=app.quit]press[/]",
]


@pytest.mark.parametrize("text", NASTY)
async def test_it_is_shown_and_kept_as_it_is(text: str) -> None:
    opener = ScriptedOpener((text + "\n\nEND",))
    if "\ud800" in text:
        opener = ScriptedOpener(("END",))
    async with chat(opener, size=(100, 60)) as driver:
        await driver.say(text)
        await driver.until(lambda: "END" in driver.words() or "fence" in driver.words())
        driver.screen.tell(text)
        driver.screen.keys.say(text)
        await driver.pilot.press("ctrl+t")
        await driver.pilot.pause()
        await driver.pilot.press("ctrl+t")
        driver.replies()[0].notice(text)
        await driver.pilot.pause()
        await driver.app.push_screen(TextDialog(text))
        await driver.pilot.pause()
        await driver.pilot.press("escape")
        await driver.app.push_screen(ChooseDialog(text, [Choice("k", text)]))
        await driver.pilot.pause()
        await driver.pilot.press("escape")
        driver.screen.prompt.set_text(text)
        await driver.pilot.pause()
        await driver.send("/" + text.replace("\n", " "))
        await driver.pilot.pause()
        assert driver.app.is_running
        assert not driver.app._exit
        last = driver.screen.chat.last
        assert last is not None
        if "\ud800" not in text:
            assert last.text == text + "\n\nEND"
        opened, _ = read(driver.screen.session.path)
        # The text area knows one kind of line break.
        user = opened.turns[0].current.user
        assert user.splitlines() == text.replace("\ud800", "\ufffd").splitlines()


async def test_brackets_are_literal_on_the_screen() -> None:
    text = "x[0] [/] [bold] [/some/path] <div>y</div>"
    async with chat(ScriptedOpener((text,))) as driver:
        await driver.say("[red]mine[/red]")
        assert text in driver.words()
        assert "[red]mine[/red]" in driver.words()


async def test_control_characters_become_signs() -> None:
    async with chat(ScriptedOpener(("a\x1b[2Jb\x07c",))) as driver:
        await driver.say("x")
        assert "a␛[2Jb␇c" in driver.words()


HUGE = {
    "one line": "x" * 200_000,
    "many lines": "line\n" * 20_000,
    "open fence": "```\n" + "code [x]\n" * 8_000,
}


@pytest.mark.parametrize("name", HUGE)
async def test_huge_text_is_taken_in_and_shown(name: str) -> None:
    text = HUGE[name]
    conversation = Conversation(turns=[Turn([Version(text, Answer(text, text, "stop"))])])
    async with chat(size=(80, 24)) as driver:
        await driver.screen.transcript.show(conversation)
        await driver.pilot.pause()
        await driver.pilot.resize_terminal(60, 15)
        await driver.pilot.pause()
        (reply,) = driver.replies()
        shown = "".join(str(piece.content) for piece in reply.body.query("PlainText > .piece"))
        assert shown.replace("\n", "") == text.replace("\n", "")


async def test_a_failed_load_and_an_error_are_literal() -> None:
    async with chat(ScriptedOpener(fail="[/] [bold broken"), wait=False) as driver:
        await driver.until(lambda: "[/] [bold broken" in driver.words())


async def test_thinking_is_literal() -> None:
    opener = ScriptedOpener(("<think>[/] [b\x1b</think>ok",), tags=ThinkTags())
    async with chat(opener) as driver:
        await driver.say("x")
        await driver.pilot.press("ctrl+o")
        await driver.until(lambda: "[/] [b␛" in driver.words())


async def test_any_size() -> None:
    async with chat(ScriptedOpener(("Hello there. " * 20,), round_ms=2)) as driver:
        for size in ((60, 15), (40, 10), (20, 5), (1, 1), (200, 60)):
            await driver.send("hi")
            await driver.pilot.resize_terminal(*size)
            await driver.pilot.press("ctrl+s")
            await driver.idle()
            await driver.pilot.resize_terminal(80, 24)
            await driver.pilot.pause()
            assert "Hello there." in driver.words()
            await driver.until(lambda: driver.screen.focused is driver.screen.prompt)


def test_visible_leaves_nothing_that_acts() -> None:
    every = "".join(map(chr, range(0x3000)))
    shown = visible(every)
    acting = [c for c in shown if (ord(c) < 0x20 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]
    assert not acting
    assert not set(shown) & set("\u202e\u2066\u2028\u2029\r")
    assert "[" in shown
