"""What is shown comes too early, too late or twice: keys, answers and loads keep their own time.

No test waits for an unlucky moment; each makes it, by holding up a mount or calling in that order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from textual.widget import AwaitMount, MountError, Widget

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.chat import Answer, Conversation, Turn, Version
from dflash_local.events import LoadProgress
from dflash_local.service_wire import ServiceOpener
from dflash_local.tui.body import Body, ReplyMarkdown
from dflash_local.tui.dialogs import ChooseDialog, TextDialog
from dflash_local.tui.loading import LoadingCard
from dflash_local.tui.plain_text import PlainText
from dflash_local.tui.pull_dialog import PullDialog
from dflash_local.tui.race import RaceScreen
from dflash_local.tui.transcript import Transcript, UserMessage
from tests.tui.driver import PATIENCE, Driver, chat

LONG = ScriptedOpener(("word " * 3000,), accepts=(2,), round_ms=10)
TWO = ScriptedOpener(("First.", "Second."), round_ms=2)


class Gate:
    """Holds up the mounts of one kind of widget until it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def reach(self) -> None:
        """Wait until a mount is held up; without the pilot, which waits for all that is held."""
        await asyncio.wait_for(self.reached.wait(), PATIENCE)


@asynccontextmanager
async def held_mounts(
    monkeypatch: pytest.MonkeyPatch, parent: type[Widget], child: type[Widget]
) -> AsyncIterator[Gate]:
    """Until the end of the block, whoever waits for such a mount waits for the gate too."""
    gate = Gate()

    async def both(mount: AwaitMount) -> None:
        await by_itself(mount)
        if isinstance(mount._parent, parent) and any(isinstance(w, child) for w in mount._widgets):
            gate.reached.set()
            await gate.opened.wait()

    async def by_itself(mount: AwaitMount) -> None:
        await asyncio.gather(*(widget._mounted_event.wait() for widget in mount._widgets))

    monkeypatch.setattr(AwaitMount, "__await__", lambda mount: both(mount).__await__())
    # The parent waits for what it mounts as well, and is to go on meanwhile.
    monkeypatch.setattr(AwaitMount, "__call__", by_itself)
    try:
        yield gate
    finally:
        gate.opened.set()


# -- leaving


async def test_an_answer_whose_widgets_still_come_when_the_app_closes_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        held_mounts(monkeypatch, Body, ReplyMarkdown) as gate,
        chat(ScriptedOpener(("Hello. " * 40,), round_ms=5)) as driver,
    ):
        await driver.send("go")
        await gate.reach()
        asyncio.get_running_loop().call_soon(_open_when_closing, driver, gate)


def _open_when_closing(driver: Driver, gate: Gate) -> None:
    if driver.app.is_running:
        asyncio.get_running_loop().call_soon(_open_when_closing, driver, gate)
    else:
        gate.opened.set()


async def test_quitting_in_mid_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with held_mounts(monkeypatch, Body, ReplyMarkdown) as gate:
        async with chat(LONG) as driver:
            await driver.send("go")
            await gate.reach()
            driver.app.exit()
            gate.opened.set()  # the answer goes on before the app has heard of the exit
            await driver.gone()
        assert driver.app.return_code == 0
        assert driver.app._exception is None


async def test_whatever_comes_after_the_exit_is_no_error() -> None:
    async with chat(TWO) as driver:
        await driver.say("hi")
        screen, info = driver.screen, driver.screen.info
        assert info is not None
        driver.app.exit()
        for late in (
            lambda: screen.load.loaded(info, 1.0),
            lambda: screen.send("more"),
            lambda: screen.load.watch(),
            lambda: screen.transcript.show(screen.chat.conversation),
            lambda: screen.perform("reply.retry", ""),
        ):
            screen.call_later(late)
        await driver.gone()
    assert driver.app.return_code == 0
    assert driver.app._exception is None


async def test_an_error_of_mounting_while_the_app_runs_is_told() -> None:
    async def wrong() -> None:
        async with chat() as driver:
            driver.screen.call_later(Body().append, "nowhere")
            await driver.gone()

    with pytest.raises(MountError):
        await wrong()


# -- widgets that are used before they are there


async def test_text_and_progress_may_come_before_the_widgets_are_there() -> None:
    async with chat() as driver:
        card, plain = LoadingCard("pair"), PlainText()
        card.show(LoadProgress("weights", 3, 10))
        await plain.append("early ")
        mounts = driver.screen.transcript.mount(card, plain)
        card.show(LoadProgress("draft", 4, 10))
        await plain.append("text")
        await mounts
        await driver.until(lambda: "Loading pair: draft" in driver.words())
        await driver.until(lambda: "early text" in driver.words())


async def test_plain_text_from_two_sides_at_once_is_whole_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from textual.widgets import Static

    lines = [f"line {number}\n" for number in range(1200)]
    async with chat(size=(40, 24)) as driver:
        plain = PlainText()
        await driver.screen.transcript.mount(plain)
        async with held_mounts(monkeypatch, PlainText, Static) as gate:
            first = asyncio.create_task(plain.append("".join(lines[:600])))
            await gate.reach()
            second = asyncio.create_task(plain.append("".join(lines[600:])))
            await asyncio.sleep(0)
            gate.opened.set()
            await asyncio.gather(first, second)
        shown = [str(piece.content) for piece in plain.query(Static)]
        assert "\n".join(shown) == "".join(lines).removesuffix("\n")


# -- an answer begins while another thing happens


async def test_a_message_counts_as_sent_before_its_widgets_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with chat(TWO) as driver:
        async with held_mounts(monkeypatch, Transcript, UserMessage) as gate:
            await driver.screen.send("one")
            assert driver.screen.generating
            await gate.reach()
            second = asyncio.create_task(driver.screen.send("two"))
            await asyncio.sleep(0)
            assert [message.text for message in driver.screen.queued] == ["two"]
            await driver.screen.perform("chat.new", "")
            await driver.until(lambda: driver.told("Stop it first"))
            gate.opened.set()
            await second
        await driver.idle()
        turns = driver.screen.chat.conversation.turns
        assert [turn.current.user for turn in turns] == ["one", "two"]
        assert [turn.current.answer.text for turn in turns if turn.current.answer] == [
            "First.",
            "Second.",
        ]
        assert [widget.turn for widget in driver.screen.transcript.message_widgets()] == [
            0, 0, 1, 1,
        ]  # fmt: skip


async def test_a_stop_before_the_answer_runs_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chat(LONG) as driver:
        async with held_mounts(monkeypatch, Transcript, UserMessage) as gate:
            await driver.screen.send("go")
            await gate.reach()
            await driver.screen.perform("chat.escape", "")
            gate.opened.set()
        await driver.idle()
        assert driver.screen.chat.last is not None
        assert driver.screen.chat.last.end == "cancelled"


async def test_a_stop_holds_for_one_answer() -> None:
    async with chat(
        ScriptedOpener(("word " * 3000, "Second."), accepts=(2,), round_ms=5)
    ) as driver:
        await driver.send("one")
        await driver.send("two")
        await driver.generating()
        await driver.pilot.press("escape")
        await driver.idle()
        ends = [turn.current.answer.end for turn in driver.screen.chat.conversation.turns]
        assert ends == ["cancelled", "stop"]


async def test_regenerating_goes_before_what_is_queued() -> None:
    opener = ScriptedOpener(("word " * 3000, "Later."), accepts=(2,), round_ms=5)
    async with chat(opener) as driver:
        await driver.send("one")
        await driver.generating()
        await driver.send("later")
        await driver.pilot.press("ctrl+r")
        await driver.until(lambda: len(driver.screen.chat.conversation.turns[0].versions) == 2)
        await driver.generating()
        assert [message.text for message in driver.screen.queued] == ["later"]
        await driver.pilot.press("escape")
        await driver.idle()
        one, later = driver.screen.chat.conversation.turns
        assert [version.answer.end for version in one.versions] == ["cancelled", "cancelled"]
        assert (later.current.user, later.current.answer.text) == ("later", "Later.")


async def test_two_regenerations_at_once_are_one() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        retry = driver.screen.perform
        await asyncio.gather(retry("reply.retry", ""), retry("reply.retry", ""))
        await driver.generating()
        await driver.pilot.press("escape")
        await driver.idle()
        (turn,) = driver.screen.chat.conversation.turns
        assert len(turn.versions) == 2
        assert driver.told("Stop it first")


async def test_a_chat_is_not_switched_under_an_answer_that_began_behind_the_dialog() -> None:
    async with chat(LONG) as driver:
        other = driver.screen.store.create(Conversation(), "pair")
        other.user(0, 0, "older")
        other.close()
        mine = driver.screen.session.path
        await driver.screen.perform("view.sessions", "")
        await driver.until(lambda: isinstance(driver.app.screen, ChooseDialog))
        await driver.screen.send("go")
        await driver.generating()
        dialog = driver.app.screen
        assert isinstance(dialog, ChooseDialog)
        dialog.dismiss(str(other.path))
        await driver.until(lambda: driver.told("Stop it first"))
        assert driver.screen.session.path == mine
        assert driver.screen.generating


async def test_a_model_is_not_switched_under_an_answer_that_began_behind_the_dialog() -> None:
    def openers(name: str) -> ServiceOpener:
        opener: ServiceOpener = ScriptedOpener((f"I am {name}.",))
        return opener

    async with chat(LONG) as driver:
        driver.screen.openers = openers
        await driver.screen.perform("model.choose", "")
        await driver.until(lambda: isinstance(driver.app.screen, ChooseDialog))
        await driver.screen.send("go")
        await driver.generating()
        dialog = driver.app.screen
        assert isinstance(dialog, ChooseDialog)
        dialog.dismiss("demo")
        await driver.until(lambda: driver.told("Stop it first"))
        assert driver.screen.pair == "scripted"
        assert driver.screen.generating


# -- the transcript


def talk(turns: int, name: str) -> Conversation:
    return Conversation(
        turns=[Turn([Version(f"{name} {n}", Answer("So.", "", "stop"))]) for n in range(turns)]
    )


async def test_earlier_turns_that_come_while_the_chat_is_switched_are_of_the_new_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with chat() as driver:
        transcript = driver.screen.transcript
        await transcript.show(talk(30, "old"))
        async with held_mounts(monkeypatch, Transcript, UserMessage) as gate:
            show = asyncio.create_task(transcript.show(talk(14, "new")))
            await gate.reach()
            earlier = asyncio.create_task(transcript._load_earlier())
            await asyncio.sleep(0)
            gate.opened.set()
            await asyncio.gather(show, earlier)
        asked = [w.text for w in transcript.message_widgets() if isinstance(w, UserMessage)]
        assert asked == [f"new {n}" for n in range(14)]


async def test_a_chat_that_is_switched_while_earlier_turns_come_shows_the_new_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with chat() as driver:
        transcript = driver.screen.transcript
        await transcript.show(talk(30, "old"))
        async with held_mounts(monkeypatch, Transcript, UserMessage) as gate:
            earlier = asyncio.create_task(transcript._load_earlier())
            await gate.reach()
            show = asyncio.create_task(transcript.show(talk(3, "new")))
            await asyncio.sleep(0)
            gate.opened.set()
            await asyncio.gather(earlier, show)
        asked = [w.text for w in transcript.message_widgets() if isinstance(w, UserMessage)]
        assert asked == [f"new {n}" for n in range(3)]


# -- the load


async def test_a_reload_in_mid_load_does_not_tell_of_the_first_ones_end() -> None:
    async with chat(ScriptedOpener(load_ms=3000), wait=False) as driver:
        await driver.until(lambda: "weights" in driver.words())
        await driver.screen.load.reload(ScriptedOpener(("Hello.",)))
        await driver.ready()
        await driver.say("hi")
        assert "closed" not in driver.words()
        assert "Hello." in driver.words()
        assert len(driver.screen.query(".loaded")) == 1
        assert not driver.screen.query(".error")


async def test_what_is_typed_as_the_load_ends_is_sent_after_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dflash_local.tui.transcript import Note

    async with (
        held_mounts(monkeypatch, Transcript, Note) as gate,
        chat(ScriptedOpener(("First.", "Second."), load_ms=300), wait=False) as driver,
    ):
        await driver.screen.send("early")
        await gate.reach()
        await driver.screen.send("late")
        gate.opened.set()
        await driver.until(lambda: len(driver.screen.chat.conversation.turns) == 2)
        await driver.idle()
        turns = driver.screen.chat.conversation.turns
        assert [turn.current.user for turn in turns] == ["early", "late"]


# -- dialogs


async def test_a_dialog_that_is_closed_twice_closes_once() -> None:
    async with chat(TWO) as driver:
        await driver.say("hi")
        prompt = driver.screen.service.prompt([{"role": "user", "content": "hi"}])
        for dialog in (
            TextDialog("text"),
            ChooseDialog("title", []),
            PullDialog("demo", "Download?"),
            RaceScreen(driver.screen.service, prompt, 4),
        ):
            closed: list[object] = []
            await driver.app.push_screen(dialog, closed.append)
            dialog.dismiss(None)
            dialog.dismiss(None)
            await driver.until(lambda: closed)  # noqa: B023
            assert driver.app.screen is driver.screen
            assert len(closed) == 1
        await driver.say("still here")
        assert "Second." in driver.words()


async def test_a_download_that_ends_under_the_palette_closes_its_own_dialog() -> None:
    async with chat() as driver:
        dialog, closed = PullDialog("demo", "Download?"), list[object]()
        await driver.app.push_screen(dialog, closed.append)
        driver.app.action_command_palette()
        await driver.until(lambda: driver.app.screen is not dialog)
        dialog.post_message(PullDialog.Ended(0, ""))
        await driver.until(lambda: closed)
        assert closed == [True]
        assert driver.app.screen is driver.screen


async def test_a_download_that_ends_as_its_dialog_is_closed_is_no_error() -> None:
    async with chat() as driver:
        dialog, closed = PullDialog("demo", "Download?"), list[object]()
        await driver.app.push_screen(dialog, closed.append)
        dialog.action_cancel()
        dialog.on_pull_dialog_ended(PullDialog.Ended(0, ""))
        await driver.until(lambda: closed)
        assert closed == [False]
        assert driver.app.screen is driver.screen


def test_every_screen_over_the_chat_is_a_dialog() -> None:
    from textual.screen import ModalScreen

    from dflash_local.tui.dialog import Dialog

    ours = [
        screen for screen in ModalScreen.__subclasses__() if screen.__module__.startswith("dflash")
    ]
    assert ours == [Dialog]
