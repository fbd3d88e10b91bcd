"""The help: keys and commands from the registry, definitions from stats.py."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_local import stats

from .actions import Registry

_PROMPT_KEYS = (
    ("Enter", "send; queue it while a reply is written"),
    ("Shift+Enter, Ctrl+J", "new line"),
    ("Up, Down", "earlier and later prompts, from the first and last row"),
    ("Tab", "complete a /command"),
    ("End", "end of the line, then end of the chat"),
)
_NAMES = {"pageup": "PageUp", "pagedown": "PageDown", "escape": "Esc"}


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


def help_text(registry: Registry, keymap: Mapping[str, str]) -> str:
    """Everything on one page."""
    lines = ["KEYS"]
    lines += [f"  {keys:<22} {what}" for keys, what in _PROMPT_KEYS]
    for action in registry.actions:
        keys = keymap.get(action.id, action.keys)
        if keys:
            focused = " (with a message focused)" if action.where == "message" else ""
            lines.append(f"  {keys_name(keys):<22} {action.title}{focused}   [{action.id}]")
    lines += ["", "COMMANDS, also in the palette (Ctrl+P)"]
    lines += [f"  {a.usage:<34} {a.title}" for a in registry.actions if a.slash]
    lines += ["  //text                             send text that begins with a slash"]
    lines += ["", "FIGURES"]
    definitions = (stats.__doc__ or "").partition("\n\n")[2].strip()
    lines += [f"  {line}" for line in definitions.splitlines()]
    lines += [
        "  * x: tok/s over the speed of plain decoding for this pair on this machine; est. until",
        "    /bench has measured it on a prompt of yours.",
        "  * ribbon: one cell per round, height = tokens emitted, from 1 to the block size.",
        "",
        "Keys can be changed: chat.json in the configuration folder, keymap = {id: keys}.",
    ]
    return "\n".join(lines)
