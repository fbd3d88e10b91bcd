"""``dflash-local completion SHELL``: a completion script for the shell to read."""

from __future__ import annotations

import argparse

from dflash_local import registry


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = 'example: eval "$(dflash-local completion bash)"'
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(args: argparse.Namespace) -> int:
    """Print the script; it is static, so completing costs no start of Python."""
    import shtab

    from dflash_local.cli import parser

    root = parser()
    _offer_names(root, sorted(registry.registry()))
    print(shtab.complete(root, shell=args.shell))  # noqa: T201
    return 0


def _offer_names(root: argparse.ArgumentParser, names: list[str]) -> None:
    """Let ``pull``, ``rm`` and ``--model`` be completed with the pairs that are known now."""
    for action in root._actions:  # argparse has no other way to its own arguments
        if isinstance(action, argparse._SubParsersAction):
            for command, sub in action.choices.items():
                if command != "add":
                    _offer_names(sub, names)
        elif action.dest in ("name", "model"):
            action.choices = names
