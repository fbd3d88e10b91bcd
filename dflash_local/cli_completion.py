"""``dflash-local completion SHELL``: a completion script for the shell to read."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = 'example: eval "$(dflash-local completion bash)"'
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(args: argparse.Namespace) -> int:
    """Print the script; it is static, so completing costs no start of Python."""
    import shtab

    from dflash_local.cli import parser

    print(shtab.complete(parser(), shell=args.shell))  # noqa: T201
    return 0
