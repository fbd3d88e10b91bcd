"""What stays on the terminal after the full screen: the last reply, and how to go on."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from dflash_local.chat import Answer
from dflash_local.sessions import Session

from .visible import visible

DEFAULT_PAIR = "demo"


def say_goodbye(session: Session, answer: Answer | None, pair: str) -> None:
    """The full screen hides what was said; leave the last reply on the terminal."""
    if answer is not None and answer.text:
        print(visible(answer.text).rstrip())  # noqa: T201
    if os.path.exists(session.path):
        print(f"Saved in {session.path}")  # noqa: T201
        print(f"To go on: {command_to_go_on(pair)}")  # noqa: T201


def command_to_go_on(pair: str, started: str | None = None) -> str:
    """A command that works in the working folder.

    Args:
        pair: what the chat ran on.
        started: the program as it was started; None takes this process's own.
    """
    program = _program(Path(started if started is not None else sys.argv[0]))
    model = [] if pair == DEFAULT_PAIR else ["--model", pair]
    return shlex.join([*program, "--continue", *model])


def _program(started: Path) -> list[str]:
    if not started.name.startswith("dflash-chat") or not started.exists():
        return [sys.executable, "-m", "dflash_local.tui.app"]
    found = shutil.which(started.name)
    if found is not None and os.path.samefile(found, started):
        return [started.name]
    whole = os.path.abspath(started)
    with suppress(ValueError):  # on another drive
        near = os.path.relpath(whole)
        return [min(near if os.sep in near else os.path.join(os.curdir, near), whole, key=len)]
    return [whole]
