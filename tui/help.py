"""The help: keys and commands from the registry, definitions from stats.py."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_local import stats

from .actions import Registry
from .chat_settings import SETTINGS

_PROMPT_KEYS = (
    ("prompt.send", "enter", "send; queue it while a reply is written"),
    ("prompt.newline", "shift+enter,ctrl+j", "new line"),
    ("", "up,down", "earlier and later prompts"),
    ("", "tab", "complete a /command"),
    ("", "end", "end of the line, then end of the chat"),
)
_NAMES = {"pageup": "PageUp", "pagedown": "PageDown", "escape": "Esc"}
CHAT_FILE = {
    "theme": "a name, see /theme; empty is dark, or light where COLORFGBG tells of it",
    "enter_sends": "false: Enter is a new line, Ctrl+J sends (also /swap)",
    "esc_twice": "true: stopping takes Esc twice",
    "panel": "off, compact or full, as Ctrl+S left it",
    "keymap": 'keys by action, as {"reply.retry": "f5"}; dflash-chat --keys lists the actions',
}
"""Values of chat.json."""


def key_name(key: str) -> str:
    """``ctrl+r`` as people write it."""
    *modifiers, last = key.split("+")
    letter = len(last) == 1
    # A letter alone is typed as it stands; behind Ctrl or Alt people know it as a capital.
    last = (last.upper() if modifiers else last) if letter else _NAMES.get(last, last.title())
    return "+".join([*(modifier.title() for modifier in modifiers), last])


def keys_name(keys: str) -> str:
    """Several of them."""
    return ", ".join(key_name(key) for key in keys.split(","))


def definitions() -> list[str]:
    """What each number means, one a line."""
    entries = (stats.__doc__ or "").partition("\n* ")[2].split("\n* ")
    return [" ".join(entry.split()) for entry in entries]


def settings_help() -> list[str]:
    """The settings of ``/set``, one a line."""
    return [f"  /set {setting.name:<11} {setting.meaning}" for setting in SETTINGS]


def keys_help(registry: Registry, keymap: Mapping[str, str]) -> list[str]:
    """Action ids with their keys, for those who write a keymap."""
    keys = [(id_, keymap.get(id_, usual), words) for id_, usual, words in _PROMPT_KEYS[:2]]
    keys += [(a.id, keymap.get(a.id, a.keys), a.title) for a in registry.actions]
    return [f"{id_:<20} {usual or '-':<20} {words}" for id_, usual, words in keys]


def help_text(registry: Registry, keymap: Mapping[str, str]) -> str:
    """Everything on one page."""
    lines = ["KEYS"]
    for id_, keys, what in _PROMPT_KEYS:
        lines.append(f"  {keys_name(keymap.get(id_, keys)):<20} {what}")
    for where, heading in (("chat", ""), ("message", "  With a message chosen (Alt+Up):")):
        lines += [heading] if heading else []
        for action in registry.actions:
            keys = keymap.get(action.id, action.keys)
            if keys and action.where == where:
                lines.append(f"  {keys_name(keys):<20} {action.title}")
    lines += ["", "COMMANDS, also in the palette (Ctrl+P)"]
    lines += [f"  {a.usage:<24} {a.title}" for a in registry.actions if a.slash]
    lines += ["  //text                   send text that begins with a slash"]
    lines += ["", "SETTINGS, from the next answer on", *settings_help()]
    lines += ["", "SETTINGS that are kept, in chat.json in the configuration folder"]
    lines += [f"  {name:<12} {words}" for name, words in CHAT_FILE.items()]
    lines += ["", "FIGURES", *(f"  {line}" for line in definitions())]
    return "\n".join(lines)
