"""``dflash-local``: finds the command, turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn, Protocol, cast

from dflash_local.errors import DflashError
from dflash_local.start import EXIT_INTERRUPTED


class CommandModule(Protocol):
    """What the module of a command offers."""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments; imports nothing heavy."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit status."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand and the module that implements it."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("generate", "dflash_local.cli_generate", "answer one prompt"),
    Command("bench", "dflash_local.cli_bench", "plain against speculative, in one process"),
    Command("pull", "dflash_local.cli_pull", "download a pair, resuming where it stopped"),
    Command("list", "dflash_local.cli_list", "the pairs and their state on this machine"),
    Command("add", "dflash_local.cli_add", "write a pair of your own into models.toml"),
    Command("rm", "dflash_local.cli_rm", "delete a pair's files"),
    Command("du", "dflash_local.cli_du", "what models take on the disk"),
    Command("train", "dflash_local.cli_train", "train a draft for a target of your own"),
    Command("doctor", "dflash_local.cli_doctor", "check this machine and say what to mend"),
    Command("completion", "dflash_local.cli_completion", "a completion script for your shell"),
)


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Print and leave with status 2."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def parser() -> argparse.ArgumentParser:
    """The whole command line; the modules named in ``COMMANDS`` add their own arguments."""
    root = OneLineParser(
        prog="dflash-local",
        description="Fast local chat with DFlash drafts. The terminal app is dflash-chat.",
    )
    root.add_argument("--version", action="store_true", help="print the version and leave")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        module = cast(CommandModule, import_module(command.module))
        sub = commands.add_parser(command.name, help=command.summary, description=command.summary)
        module.arguments(sub)
        sub.set_defaults(run=module.run)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # a console that cannot show a letter shows "?"
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    root = parser()
    args = root.parse_args(argv)
    if args.version:
        from dflash_local import __version__

        print(f"dflash-local {__version__}")  # noqa: T201
        return 0
    if args.command is None:
        root.print_help()
        return 2
    try:
        return int(args.run(args))
    except DflashError as error:
        print(f"dflash-local: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print("dflash-local: stopped", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read left; start.py closes the pipe
        raise
    except OSError as error:  # a full disk under stdout, a name that no file system takes
        print(f"dflash-local: {error}", file=sys.stderr)  # noqa: T201
        return 1
