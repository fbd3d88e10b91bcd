"""The engine or the app is killed: nothing is lost and the chat goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.chat import Conversation
from dflash_local.service import Service
from dflash_local.sessions import SessionStore, read
from dflash_local.tui.app import Options, first_session
from tests.tui.driver import chat

LONG = ScriptedOpener(("word " * 4000,), accepts=(2,), round_ms=10)

APP = """
import sys
from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.tui.app import Options, run
opener = ScriptedOpener(("word " * 4000,), accepts=(2,), round_ms=10)
sys.exit(run(opener, "scripted", Options(plain=True, prompt="go")))
"""


async def test_a_killed_engine_is_a_message_and_ctrl_r_reloads() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating(5)
        os.kill(driver.screen.service.pid, signal.SIGKILL)
        await driver.idle()
        await driver.until(lambda: "signal 9" in driver.words())
        answer = driver.replies()[0].answer
        assert answer is not None
        assert answer.end == "error"
        assert answer.text
        saved, _ = read(driver.screen.session.path)
        assert saved.turns[0].current.answer == answer
        await driver.pilot.press("ctrl+r")
        await driver.generating(3)
        assert len(driver.screen.chat.conversation.turns[0].versions) == 2
        await driver.pilot.press("escape")
        await driver.idle()


async def test_unsent_text_survives_the_death_of_the_engine() -> None:
    async with chat(LONG) as driver:
        await driver.send("go")
        await driver.generating()
        driver.screen.prompt.set_text("half a thought")
        os.kill(driver.screen.service.pid, signal.SIGKILL)
        await driver.idle()
        assert driver.screen.prompt.text == "half a thought"
        await driver.send("/reload")
        await driver.ready()
        await driver.send("again")
        await driver.generating()
        await driver.pilot.press("escape")
        await driver.idle()


async def test_a_death_while_idle_is_met_at_the_next_message() -> None:
    async with chat(ScriptedOpener(("Hi.",))) as driver:
        os.kill(driver.screen.service.pid, signal.SIGKILL)
        await driver.until(lambda: not driver.screen.service.alive)
        await driver.say("hello")
        assert "signal 9" in driver.words()
        await driver.pilot.press("ctrl+r")
        await driver.until(lambda: "Hi." in driver.words())


def test_a_killed_app_leaves_its_chat_and_no_engine() -> None:
    app = subprocess.Popen(
        [sys.executable, "-c", APP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert app.stdout is not None
    seen = b""
    while seen.count(b"word") < 30:
        seen += os.read(app.stdout.fileno(), 4096)
    children = Path(f"/proc/{app.pid}/task/{app.pid}/children")
    child = int(children.read_text().split()[0]) if children.exists() else 0
    app.kill()
    app.wait()
    while more := os.read(app.stdout.fileno(), 4096):
        seen += more
    store = SessionStore()
    (latest,) = store.newest()
    answer = store.open(latest).conversation.turns[0].current.answer
    assert answer is not None
    assert answer.end == "interrupted"
    said = seen.decode().partition("Assistant: ")[2]
    assert ("word " * 4000).startswith(answer.text)
    # What was shown is in the file; a round emits up to 3 characters here.
    assert len(answer.text) >= len(said)
    end = time.monotonic() + 5
    while child and Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not child or not Path(f"/proc/{child}").exists()


async def test_continue_opens_the_latest_chat() -> None:
    async with chat(ScriptedOpener(("Remember me.",))) as driver:
        await driver.say("first")
    async with chat(options=Options(resume=True)) as driver:
        await driver.until(lambda: "Remember me." in driver.words())
        assert "drafts accepted" in driver.words()


DAMAGE = (b"{", b'{"kind":"chat","format":99}\n', b"\xff\n", b"", b'{"kind":"answer"}\n')


def older_chat_and_damaged(damage: bytes) -> Path:
    """A chat of one message, and a newer file that is none."""
    session = SessionStore().create(Conversation(), "pair")
    session.user(0, 0, "Remember me.")
    session.close()
    bad = session.path.parent / "99999999-000000.jsonl"
    bad.write_bytes(damage)
    os.utime(bad, (time.time() + 60,) * 2)
    return bad


@pytest.mark.parametrize("damage", DAMAGE)
def test_continue_passes_over_a_damaged_chat_and_leaves_it(damage: bytes) -> None:
    bad = older_chat_and_damaged(damage)
    session, words = first_session("pair", Options(resume=True))
    session.close()
    assert session.conversation.title == "Remember me."
    assert words.endswith("It stays as it is; this is the chat before it.")
    assert bad.name in words
    assert bad.read_bytes() == damage


async def test_a_damaged_chat_is_told_on_the_screen() -> None:
    bad = older_chat_and_damaged(DAMAGE[0])
    async with chat(options=Options(resume=True)) as driver:
        await driver.until(lambda: "Remember me." in driver.words())
        assert "It stays as it is; this is the chat before it." in driver.words()
        assert bad.name in "".join(driver.shown().split())  # long paths are wrapped anywhere


def test_continue_passes_over_a_chat_that_is_open_elsewhere() -> None:
    store = SessionStore()
    for name in ("one", "two"):
        session = store.create(Conversation(), "pair")
        session.user(0, 0, name)
        session.close()
        os.utime(session.path, (len(name),) * 2)
    resume = Options(resume=True)
    first, words = first_session("pair", resume)
    assert not words
    second, words = first_session("pair", resume)
    assert words.startswith(f"The chat {first.path.stem} is open in another window.")
    assert words.endswith("this is the chat before it.")
    third, words = first_session("pair", resume)
    assert words.endswith("this is a new one.")
    assert len({session.path for session in (first, second, third)}) == 3
    for session in (first, second, third):
        session.user(len(session.conversation.turns), 0, "more")
        session.close()
    assert sorted(len(read(path)[0].turns) for path in store.newest()) == [1, 2, 2]


def test_continue_with_nothing_to_go_on_with_is_said(tmp_path: Path) -> None:
    session, words = first_session("pair", Options(resume=True))
    assert words == "There is no saved chat to go on with; this is a new one."
    (session.path.parent / "x.jsonl").write_bytes(b"{\n")
    _, words = first_session("pair", Options(resume=True))
    assert "x.jsonl is damaged" in words
    assert words.endswith("It stays as it is; this is a new one.")
    assert "\n" not in words


def test_the_service_is_closed_in_mid_answer_within_two_seconds() -> None:
    with Service(LONG) as service:
        service.wait()
        stream = service.stream("go")
        next(stream)
        began = time.monotonic()
        service.close()
        assert time.monotonic() - began < 2
        assert service._child.process.poll() is not None
