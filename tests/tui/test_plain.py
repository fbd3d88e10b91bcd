"""Plain mode: words instead of pictures, commands that are never sent."""

from __future__ import annotations

import io
import os
import re
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.events import LoadProgress
from dflash_local.service import Service
from dflash_local.sessions import SessionStore, read
from dflash_local.tui.app import Options, first_session, run
from dflash_local.tui.commands import REGISTRY
from dflash_local.tui.plain import PlainChat
from dflash_local.tui.plain_commands import COMMANDS
from tests.tui import driver


def chat(lines: str, opener: ScriptedOpener) -> tuple[str, list[str]]:
    source, target = io.StringIO(lines), io.StringIO()
    session, _ = first_session("pair", Options())
    with Service(opener) as service:
        assert PlainChat(service, "pair", session, source, target).run() == 0
    return target.getvalue(), [turn.current.user for turn in session.conversation.turns]


def test_roles_are_words_and_one_sentence_ends_a_turn() -> None:
    said, users = chat("hi\nmore\n", ScriptedOpener(("One.\x1b[31m", "Two.")))
    assert "You: hi\nAssistant: One.␛[31m\n" in said
    assert said.count("tokens per second") == 2
    assert "\x1b" not in said
    assert users == ["hi", "more"]


def test_commands_are_not_sent() -> None:
    said, users = chat("hi\n/unknown\n/retry\n//slash\n/quit\nnever\n", ScriptedOpener(("Yes.",)))
    assert users == ["hi", "/slash"]
    assert said.count("There is no command /unknown") == 1
    assert said.count("Assistant: Yes.") == 3


SAYS = {
    "/help": "tau: tokens emitted per round",
    "/set": "Settings: temp 0.0",
    "/set min_p 0.1": "min_p is 0.1 from the next answer on.",
    "/set nonsense 1": "There is no setting nonsense.",
    "/set top_p 7": "top_p is 7.0",
    "/set max": "Not a number: nothing.",
    "/system": "System prompt: none",
    "/system Be kind.": "System prompt changed",
    "/think off": "Thinking is off",
    "/think 3": "Not a choice: 3.",
    "/block off": "Plain decoding from the next answer on.",
    "/block auto": "The block that pays from the next answer on.",
    "/block 3": "Block 3 from the next answer on.",
    "/block 99": "Give 1 to 8, off or auto.",
    "/retry": "You: hi",
    "/edit": "Give it: /edit text.",
    "/edit more": "You: more",
    "/continue": "There is no stopped reply to continue.",
    "/room": "There are no older turns to leave out.",
    "/undo": "Taken back: hi",
    "/new": "New chat.",
    "/load": "1 turn: hi",
    "/load 1": "Going on with: hi, 1 turn.",
    "/load 99": "There is no saved chat 99.",
    "/save": "Saved to ",
    "/save ~nosuchuser/x": "/save: ~nosuchuser/x begins with a home folder that is not known.",
    "/save a\0b": "can be the name of no file.",
    "/save /dev/null": "/dev/null is no file.",
    "/save /": "/ is no file.",
    "/save /dev/null/x": "/dev/null/x cannot be written: ",
    "/stats": "Position 1: 100 percent of 1.",
    "/log": "The engine's log is ",
    "/quit": "",
}


@pytest.mark.parametrize("command", SAYS)
def test_what_a_command_says(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said, users = chat(f"hi\n{command}\nend\n", ScriptedOpener(("Yes.",)))
    assert SAYS[command] in said.partition("stopped by eos.")[2]
    assert not any(user.startswith("/") for user in users)
    assert said.count("You: end") == (command != "/quit")


def test_every_other_command_says_that_it_needs_the_full_screen() -> None:
    here = {command.split()[0].removeprefix("/") for command in SAYS}
    others = [a.slash for a in REGISTRY.actions if a.slash and a.slash not in here]
    assert here == set(COMMANDS)
    assert {"copy", "model", "bench", "theme", "tint"} <= set(others)
    said, users = chat("".join(f"/{name} x\n" for name in others), ScriptedOpener())
    lines = said.splitlines()
    for name in others:
        assert f"/{name} needs the full screen: start in a terminal, without --plain." in lines
    assert users == []


def test_a_stopped_reply_goes_on_and_settings_hold() -> None:
    said, _ = chat("/set max 3\nhi\n/set max off\n/continue\n", ScriptedOpener(("Hello.",)))
    assert "Assistant: Hel\n" in said
    assert "Assistant: lo.\n" in said


def test_going_on_says_with_which_chat_and_what_is_left_of_it() -> None:
    source, target = io.StringIO("/set max 3\nhi\n"), io.StringIO()
    for resume in (False, True):
        session, _ = first_session("pair", Options(resume=resume))
        with Service(ScriptedOpener(("Hello.",))) as service:
            PlainChat(service, "pair", session, source, target).run()
        if not resume:
            source, target = io.StringIO("/continue\n/load\n/load 1\n"), io.StringIO()
    first, _, later = target.getvalue().partition("Assistant: lo.\n")
    hint = "/continue goes on from here."
    assert f"Going on with: hi, 1 turn.\n{hint}\nLoading pair.\n" in first
    assert "Going on with: hi, 1 turn.\n" in later
    assert hint not in later


def test_loading_is_told_in_order() -> None:
    target = io.StringIO()
    with Service(ScriptedOpener()) as service:
        plain = PlainChat(service, "pair", first_session("pair", Options())[0], None, target)
        for stage in ("loading the target", "ready", "measuring", "measuring"):
            plain._progress(LoadProgress(stage, 0, 1))
    assert target.getvalue() == "Loading: loading the target.\nLoading: measuring.\n"


def test_a_new_chat_leaves_the_old_one_saved() -> None:
    chat("one\n/new\ntwo\n/new\n", ScriptedOpener(("Yes.",)))
    store = SessionStore()
    saved = [read(info.path)[0] for info in store.list()]
    assert sorted(chat.title for chat in saved) == ["one", "two"]
    assert all(len(chat.turns) == 1 for chat in saved)
    for path in store.newest():
        store.open(path).close()  # none is left in use


def test_a_folder_that_cannot_be_written_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_DATA", "/dev/null/x")
    monkeypatch.setenv("DFLASH_LOG", "/dev/null/x")
    said, _ = chat("hi\nmore\n", ScriptedOpener(("Yes.",)))
    assert said.count("Assistant: Yes.") == 2
    assert said.count("cannot be saved") == 1


async def test_the_full_screen_tells_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_DATA", "/dev/null/x")
    monkeypatch.setenv("DFLASH_LOG", "/dev/null/x")
    async with driver.chat(ScriptedOpener(("Yes.",))) as screen:
        await screen.say("hi")
        await screen.until(lambda: screen.told("cannot be saved"))
        assert "Yes." in screen.words()
        await screen.say("more")
        assert len(screen.replies()) == 2


PROGRAM = """
import sys
from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.tui.app import Options, run, wants_plain
assert wants_plain()
opener = ScriptedOpener(("Hello there.",))
sys.exit(run(opener, "scripted", Options(plain=True, prompt=sys.argv[1])))
"""


def shell(line: str, prompt: str = "") -> subprocess.CompletedProcess[bytes]:
    """Run a shell line in which ``chat`` is the program."""
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
    settings |= {"PYTHON": sys.executable, "PROGRAM": PROGRAM, "FIRST": prompt}
    return subprocess.run(
        ["bash", "-c", f'chat() {{ "$PYTHON" -c "$PROGRAM" "$FIRST"; }}; {line}'],
        capture_output=True,
        timeout=60,
        env={**os.environ, **settings},
    )


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@needs_bash
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (r"printf 'gr\374n\n' | chat", b"You: gr\xef\xbf\xbdn"),
        ("chat <&-", b"Assistant: Hello there."),
        ("chat <&- >&-", b""),
        ("echo hi | chat >&-", b""),
        ("yes | chat | head -1; exit ${PIPESTATUS[1]}", b"Loading scripted."),
    ],
)
def test_odd_streams_end_quietly(line: str, said: bytes) -> None:
    done = shell(line, "hi")
    assert (done.returncode, done.stderr) == (0, b"")
    assert said in done.stdout


@needs_bash
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_one_error() -> None:
    done = shell("echo hi | chat >/dev/full")
    assert b"DflashError" in done.stderr
    assert b"No space left" in done.stderr
    assert b"Exception ignored" not in done.stderr


@needs_bash
def test_the_end_of_a_pipe_tells_how_to_go_on() -> None:
    said = shell("echo hi | chat").stdout.decode()
    assert re.search(r"\nSaved in .*\.jsonl\nTo go on: .* --continue --model scripted\n$", said)
    assert b"To go on" not in shell("printf '' | chat").stdout  # nothing was said, nothing saved


LEAVING = """
try:
    status = run(opener, "scripted", Options(plain=True, prompt=sys.argv[1]))
except KeyboardInterrupt:
    status = 130
sys.exit(status)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
@pytest.mark.parametrize(
    ("at", "key", "status"),
    [(b"You: ", b"\x04", 0), (b"You: ", b"\x03", 130), (b"Loading scripted", b"\x03", 130)],
)
def test_leaving_ends_the_line_and_tells_how_to_go_on(at: bytes, key: bytes, status: int) -> None:
    import fcntl
    import pty
    import termios

    leader, follower = pty.openpty()
    program = PROGRAM.replace("assert wants_plain()", "").rpartition("sys.exit")[0] + LEAVING
    if at.startswith(b"Loading"):
        program = program.replace('("Hello there.",)', '("Hello there.",), load_ms=60_000')
    with subprocess.Popen(
        [sys.executable, "-c", program, "hi"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "dumb"},
    ) as process:
        os.close(follower)
        said = b""
        while at not in said:
            said += os.read(leader, 4096)
        os.write(leader, key)
        end = time.monotonic() + driver.PATIENCE
        with suppress(OSError):  # EIO: the other end is closed
            while time.monotonic() < end:
                if select.select([leader], [], [], 5)[0]:
                    if not (more := os.read(leader, 4096)):
                        break
                    said += more
                elif said.endswith(at):  # readline, setting the terminal up, dropped it
                    os.write(leader, key)
        process.kill()
        os.close(leader)
    assert process.returncode == status
    assert said.endswith(b"\n")
    assert b"Traceback" not in said
    last = said.decode().replace("\r", "").splitlines()
    if at == b"You: ":
        assert last[-2].startswith("Saved in ")
        assert last[-1].startswith("To go on: ")


@pytest.mark.parametrize("block", [None, 0])
def test_the_block_of_the_command_line_holds(
    block: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/stats\n"))
    assert run(ScriptedOpener(("Yes.",)), "scripted", Options(plain=True, block=block)) == 0
    assert ("Position 1: 100 percent" in capsys.readouterr().out) == (block is None)
