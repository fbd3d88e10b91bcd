"""Sessions: saved chats, one file of JSON lines each, written as things happen.

A line is appended for every message, every piece of a running answer and every finished answer,
so a killed program loses at most what was not said yet. Opening a file leaves out what finished
answers made superfluous; that rewrite is atomic. A torn last line is ignored. A file belongs to one
process at a time, and only its owner may read it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from dflash_local import session_lines
from dflash_local.chat import Answer, Conversation, Turn
from dflash_local.claim import Claim
from dflash_local.errors import DflashError
from dflash_local.events import Channel
from dflash_local.paths import data_dir
from dflash_local.private import FILE_MODE, open_private
from dflash_local.whole_file import write_whole


class SessionError(DflashError):
    """A saved chat cannot be opened or written."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A line of the session list."""

    path: Path
    title: str
    model: str
    changed: float
    turns: int


class Session:
    """One saved chat: the ``Record`` of a ``Chat``. The file appears with the first message.

    A chat matters more than its file: when that cannot be written, nothing is raised, and the
    file stays as it was from then on.

    Args:
        claim: on the file, taken; closing the session lets go of it.
        begun: the file is there.
    """

    def __init__(
        self, claim: Claim, conversation: Conversation, model: str = "", *, begun: bool = False
    ) -> None:
        self.conversation = conversation
        self.model = model
        self._claim = claim
        self._begun = begun
        self._file: int | None = None
        self._error: SessionError | None = None
        self._told = False

    @property
    def path(self) -> Path:
        """The file."""
        return self._claim.path

    def user(self, turn: int, version: int, text: str) -> None:
        """A user message was sent."""
        self._append(kind="user", turn=turn, version=version, text=text)

    def text(self, turn: int, version: int, channel: Channel, text: str) -> None:
        """A piece of the running answer came."""
        self._append(kind="text", turn=turn, version=version, channel=channel, text=text)

    def answer(self, turn: int, version: int, answer: Answer) -> None:
        """The answer ended."""
        self._append(kind="answer", turn=turn, version=version, answer=asdict(answer))

    def show(self, turn: int, version: int) -> None:
        """Another version is shown."""
        self._append(kind="show", turn=turn, version=version)

    def cut(self, turns: int) -> None:
        """Only the first ``turns`` turns remain."""
        self._append(kind="cut", turns=turns)

    def left_out(self, turns: int) -> None:
        """Requests leave the first ``turns`` turns out."""
        self._append(kind="left_out", turns=turns)

    def system(self, text: str) -> None:
        """The system prompt changed."""
        if self._begun:
            self._append(kind="system", text=text)

    def trouble(self) -> SessionError | None:
        """Why the chat is no longer saved, the first time this is asked after it happened."""
        if self._error is None or self._told:
            return None
        self._told = True
        return self._error

    def failed(self, error: OSError) -> None:
        """The file could not be written: leave it alone."""
        # Whatever followed a line that is torn would make the whole file unreadable.
        self._error = self._error or SessionError(
            f"The chat cannot be saved to {self.path}: {error.strerror or error}.",
            "It goes on unsaved. Free some space, or set DFLASH_DATA to a folder that can be "
            "written.",
        )

    def rewrite(self) -> None:
        """Write the file anew without pieces of finished answers."""
        try:
            if not self._begun:
                self._open()
            self._close_file()  # the next line belongs into the new one
            lines = map(_line, _lines_of(self.conversation, self.model))
            write_whole(self.path, b"".join(lines).decode(), FILE_MODE)
        except OSError as error:
            self.failed(error)

    def close(self) -> None:
        """Let go of the file."""
        self._close_file()
        self._claim.release()

    def _close_file(self) -> None:
        with suppress(OSError):
            if self._file is not None:
                os.close(self._file)
        self._file = None

    def _append(self, **record: object) -> None:
        if self._error is not None:
            return
        try:
            file = self._open() if self._file is None else self._file
            # One write per line: it is in the file whole or not at all, barring a power cut.
            _write(file, _line(record))
        except OSError as error:
            self.failed(error)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND
        while not self._begun:
            try:
                self._file = open_private(self.path, flags | os.O_CREAT | os.O_EXCL)
            except FileExistsError:  # by a program that does not ask for the lock
                self._claim.release()
                self._claim = _claim_new(self.path.parent)
                continue
            self._begun = True
            _write(self._file, _line(session_lines.header(self.conversation, self.model)))
        if self._file is None:
            self._file = open_private(self.path, flags)
        return self._file


class SessionStore:
    """The folder of saved chats."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or data_dir() / "chats"

    def create(self, conversation: Conversation, model: str) -> Session:
        """A new session; its name is taken, but nothing is written before its first message."""
        return Session(_claim_new(self.folder), conversation, model)

    def fork(self, conversation: Conversation, turns: int, model: str) -> Session:
        """A copy of the first turns as a session of its own."""
        copy = Conversation(
            conversation.system,
            [Turn(list(turn.versions), turn.shown) for turn in conversation.turns[:turns]],
        )
        session = self.create(copy, model)
        session.rewrite()
        return session

    def open(self, path: Path) -> Session:
        """Read a session and make it ready to go on.

        Raises:
            SessionError: the file is missing, no chat of ours, or open already.
        """
        claim = Claim(path)
        if not claim.take():
            raise SessionError(
                f"The chat {path.stem} is open in another window.",
                "Close it there, or start a new chat.",
            )
        try:
            conversation, model = read(path)
        except BaseException:
            claim.release()
            raise
        session = Session(claim, conversation, model, begun=True)
        session.rewrite()
        return session

    def remove(self, path: Path) -> None:
        """Delete a saved chat.

        Raises:
            SessionError: it is open, here or in another window, or cannot be deleted.
        """
        claim = Claim(path)
        if not claim.take():
            raise SessionError(
                f"The chat {path.stem} is open.", "Start a new one, or close it in its window."
            )
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SessionError(f"{path} cannot be deleted: {error.strerror}.") from error
        finally:
            claim.release()

    def list(self) -> list[SessionInfo]:
        """All sessions, the latest first; files that cannot be read are left out."""
        infos = []
        for path in self.folder.glob("*.jsonl"):
            with suppress(SessionError, OSError):
                conversation, model = read(path)
                infos.append(
                    SessionInfo(
                        path,
                        conversation.title,
                        model,
                        path.stat().st_mtime,
                        len(conversation.turns),
                    )
                )
        return sorted(infos, key=lambda info: info.changed, reverse=True)

    def newest(self) -> tuple[Path, ...]:
        """The files of all sessions, the one changed last first."""
        changed = []
        for path in self.folder.glob("*.jsonl"):
            with suppress(OSError):
                changed.append((path.stat().st_mtime, path))
        return tuple(path for _, path in sorted(changed, reverse=True))


def read(path: Path) -> tuple[Conversation, str]:
    """The conversation and model of a file.

    Raises:
        SessionError: the file is missing, or no chat of ours.
    """
    conversation, model, known = Conversation(), "", False
    try:
        for record in _records(path):
            if record.get("kind") == "chat":
                known = True
                model = session_lines.begin(conversation, record)
            elif known:
                session_lines.apply(conversation, record)
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error.strerror}.") from error
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise SessionError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    if not known:
        raise SessionError(f"{path} is not a saved chat.")
    return conversation, model


def to_markdown(conversation: Conversation, model: str = "") -> str:
    """The chat as a Markdown document; answers keep their own Markdown."""
    parts = [f"# {conversation.title or 'Chat'}", *([f"Model: {model}"] if model else [])]
    if conversation.system:
        parts.append(f"## System\n\n{conversation.system}")
    for turn in conversation.turns:
        parts.append(f"## You\n\n{turn.current.user}")
        if turn.current.answer is not None:
            parts.append(f"## Assistant\n\n{_closed(turn.current.answer.text)}")
    return "\n\n".join(parts) + "\n"


def _closed(text: str) -> str:
    """The text, its last code block closed: an answer may have been stopped inside it."""
    fence = ""
    for line in text.splitlines():
        mark = re.match(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)", line)
        if mark is None:
            continue
        if not fence:
            fence = mark[1]
        elif mark[1].startswith(fence) and not mark[2].strip():
            fence = ""
    return f"{text.removesuffix(chr(10))}\n{fence}" if fence else text


def to_json(conversation: Conversation, model: str = "") -> str:
    """The chat as JSON: messages as every API takes them, answers with their figures."""
    answers = [
        None if turn.current.answer is None else asdict(turn.current.answer)
        for turn in conversation.turns
    ]
    document = {"model": model, "messages": conversation.messages(whole=True), "answers": answers}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _write(file: int, line: bytes) -> None:
    if os.write(file, line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return  # torn by a crash
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def _lines_of(conversation: Conversation, model: str) -> Iterator[Mapping[str, object]]:
    """A conversation as the lines of a file, none of them superfluous."""
    yield session_lines.header(conversation, model)
    for number, turn in enumerate(conversation.turns):
        for index, version in enumerate(turn.versions):
            place = {"turn": number, "version": index}
            yield {"kind": "user", **place, "text": version.user}
            if version.answer is not None:
                yield {"kind": "answer", **place, "answer": asdict(version.answer)}
        yield {"kind": "show", "turn": number, "version": turn.shown}
    if conversation.left_out:
        yield {"kind": "left_out", "turns": conversation.left_out}


def _claim_new(folder: Path) -> Claim:
    """A name that no chat has and no other process is about to use."""
    stem = time.strftime("%Y%m%d-%H%M%S")
    for number in count(1):
        claim = Claim(folder / f"{stem if number == 1 else f'{stem}-{number}'}.jsonl")
        if claim.take():
            if not os.path.lexists(claim.path):
                return claim
            claim.release()
    raise AssertionError("unreachable")
