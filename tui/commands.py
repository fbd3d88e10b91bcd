"""What the actions do to the chat; the table at the end is the registry."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.errors import DflashError, OptionError
from dflash_local.sampling import SamplingParams
from dflash_local.sessions import to_markdown

from . import chat_settings, clipboard, figures
from . import view_commands as view
from .actions import Action, Registry
from .export import export

if TYPE_CHECKING:
    from .chat_screen import ChatScreen

DEFAULT_BLOCK = 16
"""Largest block that may be asked for while no draft is loaded that could tell."""


def copy_text(screen: ChatScreen, text: str, what: str) -> None:
    """Copy and say how it went."""
    how = clipboard.copy(text, screen.app.copy_to_clipboard)
    screen.tell(f"Copied {what}, {len(text)} characters, {how}.")


def interrupt(screen: ChatScreen, _: str) -> None:
    """Ctrl+C: stop, else copy what is selected; quit at the second press."""
    if screen.generating:
        if screen.keys.twice("quit", "Stopping. Press Ctrl+C again to quit."):
            screen.app.exit()
        else:
            screen.stop()
        return
    selected = screen.prompt.selected_text if screen.prompt.has_focus else ""
    selected = selected or screen.get_selected_text() or ""
    if selected:
        copy_text(screen, selected, "the selection")
        screen.clear_selection()
    elif screen.keys.twice("quit", "Press Ctrl+C again to quit."):
        screen.app.exit()


def escape(screen: ChatScreen, _: str) -> None:
    """Esc: close what is open, stop, or go back to the prompt."""
    if screen.completions.hide():
        return
    if screen.generating:
        if not screen.settings.esc_twice or screen.keys.twice("stop", "Press Esc again to stop."):
            screen.stop()
    elif screen.editing:
        screen.editing = False
        screen.keys.say()
    else:
        screen.prompt.focus()


def quit_app(screen: ChatScreen, _: str) -> None:
    """Leave."""
    screen.app.exit()


def quit_if_empty(screen: ChatScreen, _: str) -> None:
    """Ctrl+D: leave where the prompt is empty, else delete to the right."""
    if screen.prompt.has_focus and screen.prompt.text:
        before = screen.prompt.text
        screen.prompt.action_delete_right()
        if screen.prompt.text == before:
            screen.tell("Ctrl+D quits where the prompt is empty; Ctrl+U empties the line.")
    else:
        screen.app.exit()


async def retry(screen: ChatScreen, _: str) -> None:
    """Answer the last message once more; stops a running answer first."""
    if not screen.chat.conversation.turns:
        raise OptionError("There is nothing to regenerate yet.", "Send a message first.")
    await screen.halt()
    text = screen.chat.conversation.turns[-1].current.user
    await screen.again(screen.chat.retry, text)


async def retry_here(screen: ChatScreen, _: str) -> None:
    """Answer the focused message once more; a chat that goes on after it stays saved as it is."""
    screen.refuse_while_generating()
    turn = getattr(screen.focused, "turn", None)
    turns = screen.chat.conversation.turns
    if turn is None or turn >= len(turns):
        raise OptionError("No message has the focus.", "Choose one with Alt+Up.")
    if turn < len(turns) - 1:
        session = screen.store.fork(screen.chat.conversation, turn + 1, screen.pair)
        await screen.open_session(session)
    screen.prompt.focus()
    await retry(screen, "")


def _as_typed(text: str) -> str:
    """A message as it is written in the prompt, where one slash begins a command."""
    return f"/{text}" if text.startswith("/") else text


def edit_last(screen: ChatScreen, _: str) -> None:
    """Put the last message back into the prompt; sending it answers that turn anew."""
    screen.refuse_while_generating()
    if not screen.chat.conversation.turns:
        raise OptionError("There is no answered message to edit yet.", "Send one first.")
    screen.prompt.set_text(_as_typed(screen.chat.conversation.turns[-1].current.user))
    screen.prompt.focus()
    screen.editing = True
    screen.keys.say("Editing: Enter answers anew, Esc leaves it as it was.")


async def go_on(screen: ChatScreen, _: str) -> None:
    """Let a stopped answer go on in its place."""
    last, replies = screen.chat.last, screen.transcript.message_widgets()
    reply = replies[-1] if replies else None
    if screen.generating or last is None or not last.can_go_on or reply is None:
        raise OptionError("There is no stopped reply to continue.")
    from .reply import Reply

    if isinstance(reply, Reply):
        reply.begin_again()
        screen.answer(screen.chat.go_on, reply.turn, reply=reply)


async def new_chat(screen: ChatScreen, _: str) -> None:
    """Begin anew; the old chat stays saved."""
    from dflash_local.chat import Conversation

    screen.refuse_while_generating()
    fresh = Conversation(screen.chat.conversation.system)
    await screen.open_session(screen.store.create(fresh, screen.pair))
    screen.keys.say("New chat; the old one is saved, /undo brings it back.")


async def undo(screen: ChatScreen, _: str) -> None:
    """Back to the chat before, or the last turn taken back into the prompt."""
    turns = screen.chat.conversation.turns
    screen.refuse_while_generating()
    if turns:
        text = turns[-1].current.user
        screen.chat.cut(len(turns) - 1)
        screen.live.turned(screen.chat.last)
        await screen.transcript.show(screen.chat.conversation)
        screen.prompt.set_text(_as_typed(text))
    elif screen.previous is not None and os.path.exists(screen.previous.path):
        await screen.open_session(screen.store.open(screen.previous.path))
    else:
        raise OptionError("There is nothing to undo.")


def make_room(screen: ChatScreen, _: str) -> None:
    """Leave the oldest turns out of requests, as the context is full."""
    screen.refuse_while_generating()
    screen.tell(chat_settings.make_room(screen.chat))


def set_block(screen: ChatScreen, argument: str) -> None:
    """Rows per verify; off is plain decoding."""
    most = screen.info.rows(SamplingParams()) if screen.info else DEFAULT_BLOCK
    screen.tell(chat_settings.set_block(screen.chat, argument, most))


def set_system(screen: ChatScreen, argument: str) -> None:
    """The system prompt, from the next answer on."""
    screen.tell(chat_settings.set_system(screen.chat, argument))


def set_sampling(screen: ChatScreen, argument: str) -> None:
    """One of the sampling settings."""
    screen.tell(chat_settings.set_sampling(screen.chat, argument))


def set_thinking(screen: ChatScreen, argument: str) -> None:
    """Whether the model is asked to think."""
    screen.tell(chat_settings.set_thinking(screen.chat, argument))


def copy_part(screen: ChatScreen, argument: str) -> None:
    """The focused or last reply, a code block, or the whole chat."""
    if argument == "all":
        copy_text(screen, to_markdown(screen.chat.conversation, screen.pair), "the chat")
        return
    reply = screen.focused_reply()
    text = reply.answer.text if reply is not None and reply.answer is not None else ""
    if not text:
        raise OptionError("There is no finished reply to copy.")
    if argument in ("", "last"):
        copy_text(screen, text, "the reply")
        return
    blocks = clipboard.code_blocks(text)
    number = len(blocks) if argument == "code" else int(argument) if argument.isdecimal() else 0
    if not 1 <= number <= len(blocks):
        raise OptionError(
            f"The reply has {figures.counted(len(blocks), 'code block')}.",
            "Give last, code, a number or all.",
        )
    copy_text(screen, blocks[number - 1], f"code block {number}")


def copy_focused(screen: ChatScreen, _: str) -> None:
    """The message with the focus."""
    from .transcript import UserMessage

    if isinstance(screen.focused, UserMessage):
        copy_text(screen, screen.focused.text, "your message")
    else:
        copy_part(screen, "last")


def save(screen: ChatScreen, argument: str) -> None:
    """Export the chat to a file: JSON by its ending, else Markdown."""
    screen.tell(f"Saved to {export(screen.session, screen.pair, argument)}.")


def edit_outside(screen: ChatScreen, _: str) -> None:
    """Write the prompt in the user's editor."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.NamedTemporaryFile("w+", suffix=".md", delete=False, encoding="utf-8") as file:
        file.write(screen.prompt.full_text)
    path = Path(file.name)
    try:
        with screen.app.suspend():
            subprocess.run([*shlex.split(editor), str(path)], check=True)
        screen.prompt.set_text(path.read_text(encoding="utf-8").removesuffix("\n"), fold=False)
    except (OSError, subprocess.SubprocessError, DflashError) as error:
        raise OptionError(f"{editor} did not work: {error}.", "Set EDITOR.") from error
    finally:
        path.unlink(missing_ok=True)


REGISTRY = Registry(
    [
        Action("chat.interrupt", "Stop, copy or quit", interrupt, "ctrl+c", palette=False),
        Action(
            "chat.escape", "Close, stop, or back to the prompt", escape, "escape", palette=False
        ),
        Action("chat.leave", "Quit if the prompt is empty", quit_if_empty, "ctrl+d", palette=False),
        Action("chat.new", "New chat", new_chat, "ctrl+l", "new"),
        Action("chat.undo", "Undo: the chat before, or the last turn", undo, slash="undo"),
        Action("reply.retry", "Regenerate the last reply", retry, "ctrl+r", "retry"),
        Action("reply.edit", "Edit the last message", edit_last, slash="edit"),
        Action("reply.continue", "Continue a stopped reply", go_on, slash="continue"),
        Action("reply.thinking", "Open or close thinking", view.thinking, "ctrl+o"),
        Action("reply.earlier", "Earlier answer, or round", view.earlier, "alt+left"),
        Action("reply.later", "Later answer, or round", view.later, "alt+right"),
        Action(
            "copy.part", "Copy a reply, code or the chat", copy_part, "", "copy", "last|code|n|all"
        ),
        Action("copy.code", "Copy the last code block", copy_part, argument="code"),
        Action("copy.all", "Copy the whole chat", copy_part, argument="all"),
        Action("copy.focused", "Copy it", copy_focused, "c", where="message"),
        Action(
            "copy.focused_code",
            "Copy its last code",
            copy_part,
            "y",
            argument="code",
            where="message",
        ),
        Action("reply.retry_here", "Regenerate from here", retry_here, "r", where="message"),
        Action("prompt.editor", "Edit the prompt in $EDITOR", edit_outside, "ctrl+g"),
        Action("view.panel", "Stats panel: off, compact, full", view.panel, "ctrl+s", "stats"),
        Action("view.tint", "Tint text by origin", view.tint, "ctrl+t", "tint"),
        Action("view.sessions", "Saved chats", view.sessions, "ctrl+b", "load"),
        Action("view.palette", "Command palette", view.palette, "ctrl+p", palette=False),
        Action("view.help", "Help: keys, commands, figures", view.help_, "f1", "help"),
        Action("view.log", "The engine's log", view.log, slash="log"),
        Action("view.theme", "Theme", view.theme, slash="theme", takes="[name]"),
        Action("view.mouse", "How to leave the mouse to the terminal", view.mouse, slash="mouse"),
        Action("message.up", "Message before", view.message_up, "alt+up", palette=False),
        Action("message.down", "Message after", view.message_down, "alt+down", palette=False),
        Action("scroll.page_up", "Scroll up a page", view.page_up, "pageup", palette=False),
        Action("scroll.page_down", "Scroll down a page", view.page_down, "pagedown", palette=False),
        Action("scroll.up", "Scroll up", view.line_up, "shift+up", palette=False),
        Action("scroll.down", "Scroll down", view.line_down, "shift+down", palette=False),
        Action("scroll.follow", "Go to the end", view.follow, "ctrl+end"),
        Action("scroll.end", "Go to the end", view.follow, "end", where="message", palette=False),
        Action("model.choose", "Switch model", view.choose_model, slash="model", takes="[name]"),
        Action("model.pull", "Download a model", view.pull, slash="pull", takes="name"),
        Action("model.reload", "Reload the model", view.reload, slash="reload"),
        Action("chat.room", "Make room: leave out the oldest turns", make_room, slash="room"),
        Action("chat.system", "System prompt", set_system, slash="system", takes="text|off"),
        Action(
            "chat.set",
            "Sampling",
            set_sampling,
            slash="set",
            takes="[name value]",
        ),
        Action("chat.think", "Thinking", set_thinking, slash="think", takes="on|off|auto"),
        Action(
            "draft.block",
            "Block size, or plain decoding",
            set_block,
            slash="block",
            takes="n|off|auto",
        ),
        Action("draft.race", "Race plain against speculative", view.race, slash="bench"),
        Action("chat.save", "Export to Markdown or JSON", save, slash="save", takes="[path]"),
        Action("prompt.swap", "Swap Enter and Ctrl+J", view.swap_enter, slash="swap"),
        Action("app.quit", "Quit", quit_app, slash="quit"),
    ]
)
