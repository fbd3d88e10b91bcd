"""What is said on leaving: the last reply where a screen hid it, and how to go on."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

from dflash_local.chat import Answer
from dflash_local.select import LoadOptions
from dflash_local.sessions import Session

from .visible import visible

DEFAULT_PAIR = "demo"
_FLAGS = ("plain", "no_mouse", "low_bandwidth", "ascii", "inline")


@dataclass(frozen=True, slots=True)
class Given:
    """Arguments of the command line that hold for going on as well."""

    pair: str = ""
    draft: str | None = None
    """In place of the pair's own; it goes with no other pair."""
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: Namespace) -> Given:
        """Those among the parsed arguments of ``dflash-chat``."""
        names = (*(item.name for item in fields(LoadOptions)), "block")
        values = ((name, getattr(args, name)) for name in names)
        chosen = ((_option(name), str(value)) for name, value in values if value is not None)
        flags = [_option(name) for name in _FLAGS if getattr(args, name)]
        return cls(args.model, args.draft, (*chain.from_iterable(chosen), *flags))

    def arguments(self, pair: str) -> list[str]:
        """What loads ``pair`` as it was loaded."""
        model = [] if pair == DEFAULT_PAIR else ["--model", pair]
        draft = ["--draft", self.draft] if self.draft and pair == self.pair else []
        return [*model, *draft, *self.others]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def say_goodbye(
    session: Session,
    answer: Answer | None,
    pair: str,
    given: Given,
    unsent: Sequence[str] = (),
) -> None:
    """The full screen hides what was said; leave the last reply on the terminal, and what was
    written but never sent."""
    if answer is not None and answer.text:
        print(visible(answer.text).rstrip())  # noqa: T201
    for text in unsent:
        print(f"Not sent: {visible(text).rstrip()}")  # noqa: T201
    for line in where_it_is(session, pair, given):
        print(line)  # noqa: T201


def where_it_is(session: Session, pair: str, given: Given) -> list[str]:
    """Where the chat is saved and how it goes on; nothing where it is not saved."""
    if not os.path.exists(session.path):
        return []
    return [f"Saved in {session.path}", f"To go on: {command_to_go_on(pair, given)}"]


def command_to_go_on(pair: str, given: Given | None = None, started: str | None = None) -> str:
    """A command that works in the working folder.

    Args:
        pair: what the chat ran on.
        given: how the chat was started.
        started: the program as it was started; None takes this process's own.
    """
    program = _program(Path(started if started is not None else sys.argv[0]))
    return shlex.join([*program, "--continue", *(given or Given()).arguments(pair)])


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
