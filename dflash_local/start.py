"""Where the console scripts begin: an interrupt while modules load, or a reader that left, is no
trace.

Imports only what an interpreter has loaded anyway.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TextIO

EXIT_INTERRUPTED = 130


def main() -> int:
    """Entry point of ``dflash-local``; returns the exit status."""
    return _begun("dflash-local", "dflash_local.cli")


def chat() -> int:
    """Entry point of ``dflash-chat``; likewise."""
    return _begun("dflash-chat", "dflash_local.tui.app")


def _begun(name: str, module: str) -> int:
    """Run the module's ``main``."""
    out: TextIO | None = sys.stdout
    try:
        try:
            status: int = import_module(module).main()
        except SystemExit as left:  # argparse leaves so after --help and after a complaint
            status = left.code if isinstance(left.code, int) else 1
        if out is not None:
            out.flush()
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read has read enough
        _drop(out)
        return 0
    except OSError as error:  # a full disk behind stdout
        _drop(out)
        print(f"{name}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return status


def _drop(out: TextIO | None) -> None:
    """Send what is still buffered nowhere, or the interpreter complains about it at its end."""
    if out is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
