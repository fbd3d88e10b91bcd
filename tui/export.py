"""Export: a chat as a file for other programs, JSON by its ending, else Markdown."""

from __future__ import annotations

from pathlib import Path

from dflash_local.errors import OptionError
from dflash_local.sessions import Session, to_json, to_markdown, write_atomically


def export(session: Session, model: str, where: str = "") -> Path:
    """Write the chat to ``where``, by default a file of its name in the working folder.

    Raises:
        OptionError: it cannot be written.
    """
    path = Path(where or f"chat-{session.path.stem}.md").expanduser().absolute()
    write = to_json if path.suffix == ".json" else to_markdown
    try:
        write_atomically(path, write(session.conversation, model))
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}.") from error
    return path
