"""dflash-chat: the command line, the app, and what stays on the terminal afterwards."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from textual.app import App

from dflash_local.errors import DflashError
from dflash_local.service import Service
from dflash_local.service_wire import ServiceOpener

from .chat_screen import ChatScreen

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Options:
    """How the app runs, apart from the model."""

    plain: bool = False
    low_bandwidth: bool = False
    ascii: bool = False
    mouse: bool = True
    inline: bool = False
    prompt: str = ""
    """Sent at the start."""


class DflashApp(App[int]):
    """The full-screen chat."""

    TITLE = "dflash-chat"
    CSS_PATH = "app.tcss"

    def __init__(self, service: Service, pair: str, options: Options | None = None) -> None:
        super().__init__()
        self.options = options or Options()
        self.chat_screen = ChatScreen(service, pair=pair, low_bandwidth=self.options.low_bandwidth)

    def get_default_screen(self) -> ChatScreen:
        """The chat."""
        return self.chat_screen


def wants_plain() -> bool:
    """Whether this terminal, or its lack, asks for plain mode."""
    return (
        not (sys.stdin.isatty() and sys.stdout.isatty())
        or os.environ.get("TERM", "") in ("dumb", "unknown")
        or os.environ.get("DFLASH_PLAIN", "") not in ("", "0")
    )


def run(opener: ServiceOpener, pair: str, options: Options) -> int:
    """Chat until the user leaves; the engine runs in a process of its own meanwhile."""
    with Service(opener) as service:
        if options.plain:
            from .plain import PlainChat

            return PlainChat(service, pair, sys.stdin, sys.stdout).run(options.prompt)
        app = DflashApp(service, pair, options)
        app.run(mouse=options.mouse, inline=options.inline, inline_no_clear=options.inline)
        return app.return_code or 0


def parser() -> argparse.ArgumentParser:
    """The command line of ``dflash-chat``."""
    root = argparse.ArgumentParser(
        prog="dflash-chat", description="Chat with a local model, drafted by DFlash."
    )
    root.add_argument("prompt", nargs="?", default="", help="a first message to send at once")
    root.add_argument("--model", default="demo", help="name of a pair, repo or folder")
    root.add_argument("--draft", help="repo or folder of another draft")
    root.add_argument("--plain", action="store_true", help="lines of text, no full screen")
    root.add_argument("--backend", choices=("mlx", "torch"), help="instead of this machine's own")
    root.add_argument("--context", type=int, help="positions to hold in the cache")
    root.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal")
    root.add_argument("--low-bandwidth", action="store_true", help="redraw four times a second")
    root.add_argument("--ascii", action="store_true", help="no block characters")
    root.add_argument("--inline", action="store_true", help="below the prompt (experimental)")
    root.add_argument("--version", action="store_true", help="print the version and leave")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    args = parser().parse_args(argv)
    if args.version:
        from dflash_local import __version__

        print(f"dflash-chat {__version__}")  # noqa: T201
        return 0
    options = Options(
        plain=args.plain or wants_plain(),
        low_bandwidth=args.low_bandwidth,
        ascii=args.ascii,
        mouse=not args.no_mouse,
        inline=args.inline,
        prompt=args.prompt,
    )
    try:
        from dflash_local.select import LoadOptions, PairOpener

        opener = PairOpener(
            args.model,
            draft=args.draft,
            options=LoadOptions(backend=args.backend, context=args.context),
        )
        return run(opener, args.model, options)
    except DflashError as error:
        print(f"dflash-chat: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
