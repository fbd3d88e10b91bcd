"""Export: a chat as a file for other programs, JSON by its ending, else Markdown."""

from __future__ import annotations

from pathlib import Path

from dflash_local.errors import OptionError
from dflash_local.paths import expanded
from dflash_local.sessions import Session, to_json, to_markdown
from dflash_local.whole_file import write_whole


def export(session: Session, model: str, where: str = "") -> Path:
    """Write the chat to ``where``, by default a file of its name in the working folder.

    Raises:
        OptionError: it cannot be written, or is no name of a file.
    """
    path = expanded(where or f"chat-{session.path.stem}.md", "/save")
    write = to_json if path.suffix == ".json" else to_markdown
    try:
        path = path.absolute()  # the working folder may be gone
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is no file.", "Give another name.")
        write_whole(path, write(session.conversation, model))
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror or error}.") from error
    except ValueError as error:  # a NUL, half a character
        raise OptionError(f"{path} can be the name of no file.", "Give another name.") from error
    return path
