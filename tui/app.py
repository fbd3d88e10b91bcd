"""dflash-chat: the command line, the app, and what stays on the terminal afterwards."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.console import RenderableType
from textual.app import App, ScreenStackError, SystemCommand
from textual.css.query import NoMatches
from textual.dom import NoScreen
from textual.screen import Screen
from textual.theme import Theme
from textual.widget import MountError
from textual.worker import WorkerCancelled, WorkerFailed

from dflash_local.chat import ChatOptions, Conversation
from dflash_local.cli import OneLineParser
from dflash_local.cli_load import block_argument, load_arguments, load_options
from dflash_local.errors import DflashError, NotDownloaded
from dflash_local.paths import expanded
from dflash_local.sampling import SamplingParams
from dflash_local.service import Service
from dflash_local.service_wire import ServiceOpener
from dflash_local.sessions import Session, SessionError, SessionStore
from dflash_local.start import EXIT_INTERRUPTED

from .chat_screen import ChatScreen, Look
from .commands import REGISTRY
from .goodbye import Given, say_goodbye
from .help import keys_help, keys_name
from .settings import load_settings
from .themes import of_terminal

GONE = (MountError, NoMatches, NoScreen, ScreenStackError, WorkerCancelled)
"""What showing something raises where its place is gone."""
PICTURE_TOKENS = 200
"""Tokens of the answer in a picture."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the app runs, apart from the model."""

    plain: bool = False
    low_bandwidth: bool = False
    ascii: bool = False
    mouse: bool = True
    inline: bool = False
    resume: bool = False
    """Go on with the latest chat."""
    system: str = ""
    prompt: str = ""
    """Sent at the start."""
    block: int | None = None
    """Rows per verify; 0 is plain decoding, None follows what pays."""
    screenshot: str = ""
    """A file for a picture of the first answer, after which the app leaves."""
    given: Given = field(default_factory=Given)
    """For the command that goes on."""


class DflashApp(App[int]):
    """The full-screen chat."""

    TITLE = "dflash-chat"
    CSS_PATH = "app.tcss"

    def __init__(
        self,
        service: Service,
        pair: str,
        options: Options | None = None,
        openers: Callable[[str], ServiceOpener] | None = None,
    ) -> None:
        super().__init__()
        self._left = False
        """Whether the user has left; the app may take a while to close."""
        self.options = options = options or Options()
        self.settings = load_settings()
        self.set_keymap(self.settings.keymap)
        look = Look(options.low_bandwidth, options.ascii)
        session, words = first_session(pair, options)
        self.chat_screen = ChatScreen(
            service,
            pair=pair,
            settings=self.settings,
            look=look,
            session=session,
            words=words,
            openers=openers,
        )
        self.chat_screen.chat.options = ChatOptions(block=options.block)

    def get_default_screen(self) -> ChatScreen:
        """The chat."""
        return self.chat_screen

    async def on_mount(self) -> None:
        """Take the theme that was chosen, and remember the next choice."""
        chosen = self.settings.theme in self.available_themes
        self.theme = self.settings.theme if chosen else of_terminal(os.environ)
        self.theme_changed_signal.subscribe(self, self._theme_changed)
        if self.options.prompt and not self.options.screenshot:
            self.call_after_refresh(self.chat_screen.send, self.options.prompt)
        if self.options.screenshot:
            chat = self.chat_screen.chat
            sampling = SamplingParams(max_tokens=PICTURE_TOKENS)
            chat.options = replace(chat.options, sampling=sampling)
            self.set_interval(0.5, self._take_picture)

    def exit(
        self,
        result: int | None = None,
        return_code: int = 0,
        message: RenderableType | None = None,
    ) -> None:
        """Leave, whatever is being shown."""
        self._left = True
        super().exit(result, return_code, message)

    def _handle_exception(self, error: Exception) -> None:
        # Widgets close one after the other while an answer, the load or a key may still be about
        # to show something; every way of that fails, and none of it is to be seen any more.
        cause = error.error if isinstance(error, WorkerFailed) else error
        leaving = self._left or not self.is_running
        if not (leaving and isinstance(cause, GONE)):
            super()._handle_exception(error)

    def on_unmount(self) -> None:
        """Keep the settings."""
        self.settings.save()
        self.chat_screen.session.close()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every action of the registry, and what Textual offers."""
        if screen is self.chat_screen:
            for action in REGISTRY.actions:
                if action.palette and action.where == "chat":
                    run = partial(self.chat_screen.action_run, action.id)
                    words = keys_name(action.keys) if action.keys else action.usage
                    yield SystemCommand(action.title, words, run)
        yield from super().get_system_commands(screen)

    def _theme_changed(self, theme: Theme) -> None:
        # The terminal's own is no choice: on another terminal it may be the wrong one.
        self.settings.theme = "" if theme.name == of_terminal(os.environ) else theme.name

    async def _take_picture(self) -> None:
        """Ask once plain decoding was timed, and leave with the picture of the answer."""
        screen = self.chat_screen
        if screen.chat.last is not None and not screen.generating:
            target = Path(self.options.screenshot).expanduser().absolute()
            self.save_screenshot(target.name, str(target.parent))
            self.exit()
        elif screen.info is not None and not screen.loader.timing and not screen.generating:
            await screen.send(self.options.prompt or "Hello! What can you do?")


def first_session(pair: str, options: Options) -> tuple[Session, str]:
    """The chat to begin with, and a line about it where it is not the one that was asked for."""
    store = SessionStore()
    said = ""
    for path in store.newest() if options.resume else ():
        try:
            session = store.open(path)
        except SessionError as error:
            said = said or f"{error.cause} It stays as it is; "
            continue
        return session, said and f"{said}this is the chat before it."
    if options.resume:
        said = f"{said or 'There is no saved chat to go on with; '}this is a new one."
    return store.create(Conversation(options.system), pair), said


def wants_plain() -> bool:
    """Whether this terminal, or its lack, asks for plain mode."""
    # A closed standard stream is None, whatever its annotation says.
    streams: tuple[TextIO | None, ...] = (sys.stdin, sys.stdout)
    return (
        not all(stream is not None and stream.isatty() for stream in streams)
        or os.environ.get("TERM", "") in ("dumb", "unknown")
        or os.environ.get("DFLASH_PLAIN", "") not in ("", "0")
    )


def run(
    opener: ServiceOpener,
    pair: str,
    options: Options,
    openers: Callable[[str], ServiceOpener] | None = None,
) -> int:
    """Chat until the user leaves; the engine runs in a process of its own meanwhile."""
    with Service(opener) as service:
        if options.plain:
            from .plain import PlainChat

            session, words = first_session(pair, options)
            chat = PlainChat(service, pair, session, sys.stdin, sys.stdout, options.given)
            chat.chat.options = ChatOptions(block=options.block)
            return chat.run(options.prompt, words)
        app = DflashApp(service, pair, options, openers)
        app.run(
            mouse=options.mouse,
            inline=options.inline,
            inline_no_clear=options.inline,
            headless=bool(options.screenshot),
            size=(100, 32) if options.screenshot else None,
        )
        screen = app.chat_screen
        answer = None if options.inline else screen.chat.last
        say_goodbye(screen.session, answer, screen.pair, options.given, screen.unsent)
        return app.return_code or 0


def parser() -> argparse.ArgumentParser:
    """The command line of ``dflash-chat``."""
    root = OneLineParser(
        prog="dflash-chat", description="Chat with a local model, drafted by DFlash."
    )
    root.add_argument("prompt", nargs="?", default="", help="a first message to send at once")
    root.add_argument("--plain", action="store_true", help="lines of text, no full screen")
    root.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal")
    root.add_argument("--low-bandwidth", action="store_true", help="redraw four times a second")
    root.add_argument("--ascii", action="store_true", help="no block characters")
    root.add_argument("--inline", action="store_true", help="below the prompt (experimental)")
    root.add_argument("--continue", dest="resume", action="store_true", help="the latest chat")
    root.add_argument("--system", default="", help="the system prompt")
    root.add_argument("--screenshot", default="", metavar="SVG", help="picture of one answer")
    root.add_argument("--keys", action="store_true", help="print every action's id and keys")
    root.add_argument("--version", action="store_true", help="print the version and leave")
    block_argument(root)
    load_arguments(root)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    args = parser().parse_args(argv)
    if args.version:
        from dflash_local import __version__

        print(f"dflash-chat {__version__}")  # noqa: T201
        return 0
    options = Options(
        plain=args.plain or (wants_plain() and not args.screenshot),
        low_bandwidth=args.low_bandwidth,
        ascii=args.ascii,
        mouse=not args.no_mouse,
        inline=args.inline,
        resume=args.resume,
        system=args.system,
        prompt=args.prompt,
        block=args.block,
        screenshot=args.screenshot,
        given=Given.of(args),
    )
    try:
        return _chat(args, options)
    except DflashError as error:
        print(f"dflash-chat: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _chat(args: argparse.Namespace, options: Options) -> int:
    from dflash_local.registry import locate
    from dflash_local.select import PairOpener, backend_name

    if args.keys:
        print("\n".join(keys_help(REGISTRY, load_settings().keymap)))  # noqa: T201
        return 0
    expanded(options.screenshot, "--screenshot")  # refused before anything is loaded
    load = load_options(args)
    backend = backend_name(args.backend)

    def openers(model: str, draft: str | None = None) -> ServiceOpener:
        locate(model, None if draft == "none" else draft, backend=backend)
        return PairOpener(model, draft, load)

    try:
        opener = openers(args.model, args.draft)
    except NotDownloaded:
        if options.plain or options.screenshot:
            raise
        opener = PairOpener(args.model, args.draft, load)  # the screen offers the download
    return run(opener, args.model, options, openers)


if __name__ == "__main__":
    sys.exit(main())
