"""What the actions do to the view: scrolling, panels, dialogs, the model."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local import registry
from dflash_local.errors import DflashError, OptionError

from . import figures
from .dialogs import Choice, ChooseDialog, TextDialog
from .help import help_text
from .machine import memory_here
from .offer import offer
from .themes import of_terminal
from .visible import one_line

if TYPE_CHECKING:
    from .chat_screen import ChatScreen

LOG_SHOWN = 20_000
"""Characters of the log's end that are shown."""


def page_up(screen: ChatScreen, _: str) -> None:
    """Scroll."""
    screen.transcript.page(-1)


def page_down(screen: ChatScreen, _: str) -> None:
    """Scroll."""
    screen.transcript.page(1)


def line_up(screen: ChatScreen, _: str) -> None:
    """Scroll."""
    screen.transcript.line(-1)


def line_down(screen: ChatScreen, _: str) -> None:
    """Scroll."""
    screen.transcript.line(1)


def follow(screen: ChatScreen, _: str) -> None:
    """Go to the end."""
    screen.transcript.follow()


def message_up(screen: ChatScreen, _: str) -> None:
    """Focus the message before."""
    _move(screen, -1)


def message_down(screen: ChatScreen, _: str) -> None:
    """Focus the message after; behind the last one comes the prompt."""
    _move(screen, 1)


def _move(screen: ChatScreen, direction: int) -> None:
    widgets = screen.transcript.message_widgets()
    focused = screen.focused
    here = next((i for i, widget in enumerate(widgets) if widget is focused), len(widgets))
    target = here + direction
    if target >= len(widgets):
        screen.prompt.focus()
    elif target >= 0:
        widgets[target].focus()


async def thinking(screen: ChatScreen, _: str) -> None:
    """Open or close the thinking of the focused or last reply."""
    reply = screen.focused_reply()
    if reply is not None:
        await reply.thinking.toggle()


async def earlier(screen: ChatScreen, _: str) -> None:
    """The round before while tinted, else the answer before."""
    await _step(screen, -1)


async def later(screen: ChatScreen, _: str) -> None:
    """The round after while tinted, else the answer after."""
    await _step(screen, 1)


async def _step(screen: ChatScreen, direction: int) -> None:
    reply = screen.focused_reply()
    turns = screen.chat.conversation.turns
    if reply is None or screen.generating or not turns:
        return
    if screen.transcript.tinted:
        reply.step(direction)
        return
    target = turns[-1].shown + direction
    if 0 <= target < len(turns[-1].versions):
        screen.chat.show(target)
        await screen.transcript.show(screen.chat.conversation)


def panel(screen: ChatScreen, _: str) -> None:
    """Off, compact, full."""
    screen.settings.panel = screen.panel.cycle()


def tint(screen: ChatScreen, _: str) -> None:
    """Text by origin, or as Markdown."""
    from .reply import Reply
    from .tint import Legend

    screen.transcript.tinted = tinted = not screen.transcript.tinted
    screen.query_one(Legend).set_class(tinted, "shown")
    for reply in screen.query(Reply):
        reply.tint(tinted)


def palette(screen: ChatScreen, _: str) -> None:
    """Everything, searchable."""
    screen.app.action_command_palette()


def help_(screen: ChatScreen, _: str) -> None:
    """Keys, commands and what the figures mean."""
    from .commands import REGISTRY

    screen.app.push_screen(TextDialog(help_text(REGISTRY, screen.settings.keymap)))


def log(screen: ChatScreen, _: str) -> None:
    """What the engine process printed."""
    text = screen.service.log.read_text(errors="replace")[-LOG_SHOWN:]
    screen.app.push_screen(TextDialog(f"{screen.service.log}\n\n{text or '(empty)'}"))


def theme(screen: ChatScreen, argument: str) -> None:
    """Choose a theme."""
    if not argument:
        screen.app.search_themes()
    elif argument == "auto":
        screen.app.theme = of_terminal(os.environ)
    elif argument in screen.app.available_themes:
        screen.app.theme = argument
    else:
        names = ", ".join(["auto", *sorted(screen.app.available_themes)])
        raise OptionError(f"There is no theme {one_line(argument, 40)}.", f"There are {names}.")


def mouse(screen: ChatScreen, _: str) -> None:
    """How to select text with the terminal's own mouse."""
    screen.tell(
        "Hold Shift (Option on macOS) to select with the terminal's own mouse, or start with "
        "--no-mouse: then the wheel and clicks go to the terminal."
    )


def swap_enter(screen: ChatScreen, _: str) -> None:
    """Enter sends, or Enter is a new line."""
    screen.settings.enter_sends = not screen.settings.enter_sends
    screen.settings.save()
    screen.apply_settings()


def sessions(screen: ChatScreen, _: str) -> None:
    """Choose a saved chat."""
    screen.refuse_while_generating()
    infos = screen.store.list()[:200]
    if not infos:
        raise OptionError("There is no saved chat yet.", "Every chat is saved as it goes.")
    choices = []
    for info in infos:
        when = time.strftime("%d %b %H:%M", time.localtime(info.changed))
        title = f"{one_line(info.title or '(empty)', 50):<50}"
        line = f"{when}  {title}  {figures.turns(info.turns):>9}  {info.model}"
        choices.append(Choice(str(info.path), line))

    async def chosen(key: str | None) -> None:
        info = next((info for info in infos if str(info.path) == key), None)
        if info is None or info.path == screen.session.path:
            return
        try:
            screen.refuse_while_generating()  # an answer may have begun behind the dialog
            await screen.open_session(screen.store.open(info.path))
        except DflashError as error:
            screen.tell(str(error), severity="error")

    def remove(key: str) -> None:
        screen.store.remove(Path(key))

    hint = "Enter opens · Delete deletes · Esc closes"
    screen.app.push_screen(ChooseDialog("Saved chats", choices, hint=hint, remove=remove), chosen)


async def choose_model(screen: ChatScreen, argument: str) -> None:
    """Switch to another pair; without a name, choose one that fits this machine."""
    screen.refuse_while_generating()
    if argument:
        await _switch(screen, argument)
        return
    offers = sorted(map(offer, registry.registry().values()), key=lambda o: not o.possible)
    choices = [Choice(o.pair.name, o.line, enabled=o.possible) for o in offers]

    async def chosen(name: str | None) -> None:
        if name is not None:
            await screen.perform("model.choose", name)

    title = f"Models · this machine has {figures.gigabytes(memory_here())} of memory"
    hint = "Enter chooses, and downloads where needed · Esc closes"
    screen.app.push_screen(ChooseDialog(title, choices, hint=hint), chosen)


async def _switch(screen: ChatScreen, name: str) -> None:
    from dflash_local.errors import NotDownloaded

    if screen.openers is None:
        raise OptionError("The model cannot be switched here.")
    try:
        opener = screen.openers(name)
    except NotDownloaded:
        pull(screen, name)
        return
    screen.pair = screen.chat.model = name
    screen.chat.plain_tok_s = screen.live.plain_tok_s = None
    screen.chat.estimated = screen.live.estimated = True
    await screen.load.reload(opener)


def pull(screen: ChatScreen, name: str) -> None:
    """Download a pair, then load it."""
    from .pull_dialog import PullDialog

    if not name:
        raise OptionError("Which model?", "Give its name; /model lists them.")
    offered = offer(registry.find(name))
    if offered.here and name == screen.pair and screen.service.alive:
        screen.tell(f"{name} is here, and loaded.")
        return
    if not offered.possible:
        raise OptionError(
            f"{offered.pair.name} has no target for this machine's backend.",
            "/model lists those that have one.",
        )

    async def pulled(ready: bool | None) -> None:
        if ready:
            await screen.perform("model.choose", name)

    screen.app.push_screen(PullDialog(name, offered.question), pulled)


async def reload(screen: ChatScreen, _: str) -> None:
    """Start the engine process anew."""
    await screen.halt()
    await screen.load.reload()


async def race(screen: ChatScreen, _: str) -> None:
    """Plain against speculative on the last message."""
    from .race import RaceScreen

    if screen.generating or screen.info is None:
        raise OptionError("The engine is busy.", "Wait, or stop it with Esc.")
    if screen.info.draft is None:
        raise OptionError("There is no draft to race with.", "Load a pair with one: /model.")
    request = screen.chat.conversation.messages()
    if request and request[-1]["role"] == "assistant":
        request.pop()
    if not request or request[-1]["role"] != "user":
        request.append({"role": "user", "content": "Explain how a bicycle stays upright."})
    prompt = screen.service.prompt(request, screen.chat.options.thinking)

    def ended(plain: float | None) -> None:
        if plain:
            screen.load.timed(plain, estimated=False)

    screen.app.push_screen(RaceScreen(screen.service, prompt), ended)
