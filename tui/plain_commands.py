"""What the slash commands do in plain mode; those that are not here need the full screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from dflash_local.chat import Conversation
from dflash_local.errors import OptionError
from dflash_local.sessions import SessionStore

from . import chat_settings, figures
from .commands import REGISTRY
from .export import export
from .help import definitions, settings_help
from .visible import one_line

if TYPE_CHECKING:
    from .plain import PlainChat

LISTED = 20
"""Saved chats that are offered."""


def _help(plain: PlainChat, _: str) -> None:
    plain.say("Commands:")
    for action in REGISTRY.actions:
        if action.slash in COMMANDS:
            takes, title = _HERE.get(action.slash, (action.takes, action.title))
            plain.say(f"  {f'/{action.slash} {takes}'.strip():<24} {title}")
    plain.say("  //text                   send text that begins with a slash")
    for line in ("Settings:", *settings_help(), "Figures:", *definitions()):
        plain.say(line)


def _set(plain: PlainChat, argument: str) -> None:
    plain.say(chat_settings.set_sampling(plain.chat, argument))


def _system(plain: PlainChat, argument: str) -> None:
    plain.say(chat_settings.set_system(plain.chat, argument))


def _think(plain: PlainChat, argument: str) -> None:
    plain.say(chat_settings.set_thinking(plain.chat, argument))


def _block(plain: PlainChat, argument: str) -> None:
    plain.say(chat_settings.set_block(plain.chat, argument, plain.rows))


def _room(plain: PlainChat, _: str) -> None:
    plain.say(chat_settings.make_room(plain.chat))


def _retry(plain: PlainChat, _: str) -> None:
    plain.turn(_last_user(plain), plain.chat.retry)


def _edit(plain: PlainChat, argument: str) -> None:
    _last_user(plain)
    if not argument:
        raise OptionError("What shall the message be?", "Give it: /edit text.")
    plain.turn(argument, partial(plain.chat.edit, argument))


def _continue(plain: PlainChat, _: str) -> None:
    if plain.chat.last is None or not plain.chat.last.can_go_on:
        raise OptionError("There is no stopped reply to continue.")
    plain.turn("", plain.chat.go_on)


def _undo(plain: PlainChat, _: str) -> None:
    text = _last_user(plain)
    plain.chat.cut(len(plain.chat.conversation.turns) - 1)
    plain.say(f"Taken back: {one_line(text, 60)}")


def _new(plain: PlainChat, _: str) -> None:
    store = SessionStore(plain.session.path.parent)
    plain.go_to(store.create(Conversation(plain.chat.conversation.system), plain.pair))
    plain.say("New chat.")


def _load(plain: PlainChat, argument: str) -> None:
    store = SessionStore(plain.session.path.parent)
    infos = store.list()[:LISTED]
    if not argument:
        for number, info in enumerate(infos, 1):
            when = time.strftime("%d %b %H:%M", time.localtime(info.changed))
            plain.say(f"{number}. {when}, {figures.turns(info.turns)}: {one_line(info.title, 50)}")
        plain.say("/load and a number opens one." if infos else "There is no saved chat yet.")
        return
    if not (argument.isdecimal() and 1 <= int(argument[:9]) <= len(infos)):
        raise OptionError(f"There is no saved chat {argument[:20]}.", "/load lists them.")
    path = infos[int(argument) - 1].path
    if path != plain.session.path:
        plain.go_to(store.open(path))
    plain.say_where()


def _save(plain: PlainChat, argument: str) -> None:
    plain.say(f"Saved to {export(plain.session, plain.pair, argument)}.")


def _stats(plain: PlainChat, _: str) -> None:
    answer = plain.chat.last
    if answer is None or answer.stats is None:
        raise OptionError("There are no figures yet.", "Send a message first.")
    plain.say(figures.sentence(answer))
    for rate in answer.stats.positions:
        plain.say(f"Position {rate.position}: {100 * rate.rate:.0f} percent of {rate.rounds}.")


def _log(plain: PlainChat, _: str) -> None:
    plain.say(f"The engine's log is {plain.service.log}.")


def _last_user(plain: PlainChat) -> str:
    turns = plain.chat.conversation.turns
    if not turns:
        raise OptionError("There is no message yet.", "Send one first.")
    return turns[-1].current.user


def _quit(plain: PlainChat, _: str) -> None:
    plain.leaving = True


COMMANDS: Mapping[str, Callable[[PlainChat, str], None]] = {
    "help": _help,
    "set": _set,
    "system": _system,
    "think": _think,
    "block": _block,
    "room": _room,
    "retry": _retry,
    "edit": _edit,
    "continue": _continue,
    "undo": _undo,
    "new": _new,
    "load": _load,
    "save": _save,
    "stats": _stats,
    "log": _log,
    "quit": _quit,
}
_HERE = {
    "edit": ("text", "Answer the last message anew, as this text"),
    "help": ("", "Commands, settings and what the figures mean"),
    "load": ("[number]", "List the saved chats, or open one"),
    "stats": ("", "The figures of the last answer"),
    "undo": ("", "Take the last message and its answer back"),
}
"""Arguments and words where they differ from the full screen's."""
