"""Actions: the one registry from which keys, slash commands, the palette and the help are made."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from textual.binding import Binding

from dflash_local.errors import DflashError

if TYPE_CHECKING:
    from .chat_screen import ChatScreen

Run = Callable[["ChatScreen", str], Awaitable[None] | None]
Where = Literal["chat", "message"]


class UnknownCommand(DflashError):
    """A slash command that does not exist."""


@dataclass(frozen=True, slots=True)
class Action:
    """Something the user can do."""

    id: str
    """Stable: the user's keymap refers to it."""
    title: str
    run: Run
    keys: str = ""
    """Comma separated; empty where only palette and slash reach it."""
    slash: str = ""
    """Name behind the slash."""
    takes: str = ""
    """The slash command's argument, as the help shows it."""
    argument: str = ""
    """What ``run`` gets when called by key or palette."""
    where: Where = "chat"
    """``message``: the key works while a message has the focus."""
    palette: bool = True

    @property
    def usage(self) -> str:
        """``/copy [last|code|n|all]``."""
        return f"/{self.slash} {self.takes}".strip() if self.slash else ""


class Registry:
    """All actions, by id and by slash name."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self.actions = tuple(actions)
        self._by_id = {action.id: action for action in self.actions}
        self._by_slash = {action.slash: action for action in self.actions if action.slash}
        assert len(self._by_id) == len(self.actions), "two actions of one id"

    def __getitem__(self, action_id: str) -> Action:
        return self._by_id[action_id]

    def bindings(self, where: Where) -> list[Binding]:
        """Key bindings for a screen or a message."""
        return [
            Binding(
                action.keys,
                f"screen.run({action.id!r})",
                action.title,
                show=False,
                id=action.id,
            )
            for action in self.actions
            if action.keys and action.where == where
        ]

    def complete(self, text: str) -> Sequence[Action]:
        """Slash commands that begin as ``text`` does; none once an argument is typed."""
        if not text.startswith("/") or text.startswith("//") or " " in text or "\n" in text:
            return ()
        return [a for name, a in sorted(self._by_slash.items()) if name.startswith(text[1:])]

    def parse(self, text: str, among: Collection[str] | None = None) -> tuple[Action, str]:
        """The action and argument of a slash command.

        Args:
            text: as typed.
            among: the names that can be meant; None is all.

        Raises:
            UnknownCommand: there is none of that name; the nearest one is named.
        """
        name, _, argument = text[1:].partition(" ")
        name = name.strip().lower()
        if name not in self._by_slash:
            near = difflib.get_close_matches(name, among or self._by_slash, n=1, cutoff=0.5)
            hint = f"Did you mean /{near[0]}?" if near else "/help lists the commands."
            raise UnknownCommand(
                f"There is no command /{name[:40]}.", f"{hint} Begin with // to send a slash."
            )
        return self._by_slash[name], argument.strip()
