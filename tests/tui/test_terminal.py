"""The real program on a real terminal: start, chat, stop, leave; and without one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_local import demo
from tests.tui.driver import PATIENCE

SCRIPTED = """
import sys
from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.tui.app import Options, run, wants_plain
opener = ScriptedOpener(("Hello there.", "word " * 4000), accepts=(2,), round_ms=10, noise="NOISE")
sys.exit(run(opener, "scripted", Options(plain=wants_plain())))
"""

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


def environment() -> dict[str, str]:
    names = ("PATH", "HOME", "DFLASH_CONFIG", "DFLASH_DATA", "DFLASH_LOG", "DFLASH_CACHE")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    path = os.pathsep.join(filter(None, sys.path))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}


class Terminal:
    """A shell in tmux."""

    def __init__(self, folder: Path) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", os.devnull]
        settings = [f"{name}={value}" for name, value in environment().items()]
        shell = shlex.join(["env", *settings, "PS1=$ ", "sh"])
        self._run("new-session", "-d", "-x", "80", "-y", "24", shell)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def type(self, text: str, *keys: str) -> None:
        self._run("send-keys", "-l", text)
        if keys:
            self._run("send-keys", *keys)

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    def until(self, part: str) -> str:
        """The screen once it shows these words, wherever their line breaks."""
        end = time.monotonic() + PATIENCE
        while part not in " ".join((screen := self.screen()).split()):
            assert time.monotonic() < end, f"no {part!r} in:\n{screen}"
            time.sleep(0.05)
        return screen

    def close(self) -> None:
        self._run("kill-server")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "scripted.py"
    path.write_text(SCRIPTED)
    return shlex.join([sys.executable, str(path)])


@needs_tmux
def test_start_chat_stop_and_leave(terminal: Terminal, script: str) -> None:
    terminal.type(f"{script}; echo LEFT $?", "Enter")
    terminal.until("Ready")
    # In one burst, as a paste or a fast typist sends it.
    terminal.type("hi", "Enter")
    screen = terminal.until("stopped by eos")
    assert "Hello there." in screen
    assert "NOISE" not in screen
    terminal.type("more", "Enter")
    terminal.until("word word")
    terminal.press("Escape")
    terminal.until("stopped by you")
    terminal.press("C-d")
    screen = terminal.until("LEFT 0")
    assert "Saved in" in screen
    assert "tok/s" not in screen  # the alternate screen is gone
    terminal.type("stty -a | grep -o ' echo '", "Enter")
    terminal.until(" echo")


@needs_tmux
def test_leaving_in_mid_answer_takes_less_than_two_seconds(terminal: Terminal, script: str) -> None:
    terminal.type(f"{script}; echo LEFT $?", "Enter")
    terminal.until("Ready")
    terminal.type("hi", "Enter")
    terminal.until("stopped by eos")
    terminal.type("more", "Enter")
    terminal.until("word word")
    began = time.monotonic()
    terminal.press("C-d")
    terminal.until("LEFT 0")
    took = time.monotonic() - began
    print(f"left after {took:.2f} s")
    assert took < 5  # 2 s on a machine that is not loaded


@needs_tmux
@pytest.mark.parametrize("setting", ["TERM=dumb", "DFLASH_PLAIN=1"])
def test_plain_mode_on_a_terminal(terminal: Terminal, script: str, setting: str) -> None:
    terminal.type(f"{setting} {script}; echo LEFT $?", "Enter")
    terminal.until("You:")
    terminal.type("hi", "Enter")
    screen = terminal.until("stopped by eos.")
    assert "Assistant: Hello there." in screen
    terminal.type("more", "Enter")
    terminal.until("word word")
    terminal.press("C-c")
    terminal.until("stopped by you.")
    terminal.press("C-d")
    terminal.until("LEFT 0")


@needs_tmux
@pytest.mark.slow
@pytest.mark.skipif(demo.installed() is None, reason="the demo pair is not on this machine")
def test_the_demo_pair_as_a_new_user_meets_it(terminal: Terminal) -> None:
    program = shlex.join(
        [sys.executable, "-c", "from dflash_local.tui.app import main; exit(main())"]
    )
    terminal.type(f"{program}; echo LEFT $?", "Enter")
    terminal.until("Message, or / for commands")
    terminal.until("Enter send")
    terminal.type("Write one sentence about the sea.", "Enter")
    terminal.until("first token")  # whether drafting pays is the machine's affair
    terminal.type("Write a long story about a lighthouse keeper, in many chapters.", "Enter")
    terminal.until("tok/s")
    time.sleep(0.5)
    terminal.press("Escape")
    terminal.until("/continue")
    terminal.press("C-c", "C-c")
    terminal.until("LEFT 0")


def test_pipes_are_plain_lines(script: str) -> None:
    done = subprocess.run(
        shlex.split(script),
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=True,
    )
    assert "Assistant: Hello there." in done.stdout
    assert "\x1b" not in done.stdout
    assert "tokens per second" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--model", "no-such-model"], ["--context", "0"], ["--backend", "nonsense"], ["--no-such"]],
)
def test_bad_arguments_are_one_line_and_an_exit_status(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from dflash_local.tui.app import main; exit(main())", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        env=environment(),
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
    assert not done.stdout
