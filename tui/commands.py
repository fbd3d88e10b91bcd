"""What each action does, as functions of the chat screen; the table at the end is the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_local.errors import OptionError

from .actions import Action, Registry

if TYPE_CHECKING:
    from .chat_screen import ChatScreen


async def interrupt(screen: ChatScreen, _: str) -> None:
    """Ctrl+C: stop, else copy what is selected, else quit at the second press."""
    if screen.generating:
        screen.stop()
    elif not screen.copy_selection():
        screen.arm_quit()


async def escape(screen: ChatScreen, _: str) -> None:
    """Esc: close what is open, stop, or go back to the prompt."""
    if screen.generating:
        screen.stop()
    else:
        screen.prompt.focus()


def quit_app(screen: ChatScreen, _: str) -> None:
    """Leave."""
    screen.app.exit()


def quit_if_empty(screen: ChatScreen, _: str) -> None:
    """Ctrl+D: leave where the prompt is empty, else delete to the right."""
    if screen.prompt.has_focus and screen.prompt.text:
        screen.prompt.action_delete_right()
    else:
        screen.app.exit()


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


async def retry(screen: ChatScreen, _: str) -> None:
    """Answer the last message once more."""
    await screen.retry()


async def new_chat(screen: ChatScreen, _: str) -> None:
    """Begin anew."""
    if screen.generating:
        raise OptionError("An answer is being written.", "Stop it first, with Esc.")
    await screen.new_chat()


async def go_on(screen: ChatScreen, _: str) -> None:
    """Let a stopped answer go on."""
    await screen.go_on()


async def toggle_thinking_text(screen: ChatScreen, _: str) -> None:
    """Open or close the thinking of the focused or last reply."""
    reply = screen.focused_reply()
    if reply is not None:
        await reply.thinking.toggle()


def set_block(screen: ChatScreen, argument: str) -> None:
    """Rows per verify; off is plain decoding."""
    screen.set_block(argument)


REGISTRY = Registry(
    [
        Action("chat.interrupt", "Stop, copy or quit", interrupt, "ctrl+c", palette=False),
        Action("chat.escape", "Stop, or back to the prompt", escape, "escape", palette=False),
        Action("chat.quit_if_empty", "Quit", quit_if_empty, "ctrl+d", palette=False),
        Action("chat.new", "New chat", new_chat, "ctrl+l", slash="new"),
        Action("reply.retry", "Regenerate the last reply", retry, "ctrl+r", slash="retry"),
        Action("reply.continue", "Continue a stopped reply", go_on, slash="continue"),
        Action("reply.thinking", "Open or close thinking", toggle_thinking_text, "ctrl+o"),
        Action("scroll.page_up", "Scroll up a page", page_up, "pageup", palette=False),
        Action("scroll.page_down", "Scroll down a page", page_down, "pagedown", palette=False),
        Action("scroll.up", "Scroll up", line_up, "shift+up", palette=False),
        Action("scroll.down", "Scroll down", line_down, "shift+down", palette=False),
        Action("scroll.follow", "Go to the end", follow, "ctrl+end"),
        Action(
            "draft.block", "Block size, or plain decoding", set_block, slash="block", takes="n|off"
        ),
        Action("app.quit", "Quit", quit_app, slash="quit"),
    ]
)
