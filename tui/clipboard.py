"""The clipboard: the machine's own tool where we run on it, the terminal's sequence over SSH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from markdown_it import MarkdownIt

_TIMEOUT_S = 3.0


def tool(environment: Mapping[str, str] = os.environ) -> Sequence[str]:
    """The command that takes text for the clipboard from its input; empty where none serves."""
    if environment.get("SSH_CONNECTION") or environment.get("SSH_TTY"):
        return ()
    candidates: list[tuple[str, ...]] = []
    if sys.platform == "darwin":
        candidates.append(("pbcopy",))
    if sys.platform == "win32" or "WSL_DISTRO_NAME" in environment:
        candidates.append(("clip.exe",))
    if environment.get("WAYLAND_DISPLAY"):
        candidates.append(("wl-copy",))
    if environment.get("DISPLAY"):
        candidates.append(("xclip", "-selection", "clipboard"))
        candidates.append(("xsel", "--clipboard", "--input"))
    return next((c for c in candidates if shutil.which(c[0])), ())


def copy(text: str, by_terminal: Callable[[str], None]) -> str:
    """Copy and say, honestly, how it went: a clause for "Copied the reply ...".

    Args:
        text: what to copy.
        by_terminal: writes the terminal's own sequence (OSC 52).
    """
    command = tool()
    if command:
        try:
            # DEVNULL: a tool that stays to serve the selection must not hold our terminal.
            subprocess.run(
                command,
                input=text.encode("utf-8", errors="replace"),
                check=True,
                timeout=_TIMEOUT_S,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError):
            pass
        else:
            return "to the clipboard"
    by_terminal(text)
    if os.environ.get("TERM_PROGRAM") == "Apple_Terminal":
        return "but this terminal takes no copies; /save writes a file"
    if os.environ.get("TMUX"):
        return "by way of tmux, if its set-clipboard is on"
    return "by way of the terminal, if it allows that"


def code_blocks(text: str) -> list[str]:
    """The code blocks of a Markdown text, in order."""
    tokens = MarkdownIt("commonmark").parse(text)
    return [token.content for token in tokens if token.type in ("fence", "code_block")]
