"""The file of a chat belongs to one process, and only its owner may read it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from dflash_local.chat import Answer, Conversation, Turn, Version
from dflash_local.history import PromptHistory
from dflash_local.sessions import SessionError, SessionStore, read
from dflash_local.whole_file import write_whole

OTHER = """
import sys, pathlib
from dflash_local.chat import Conversation
from dflash_local.sessions import SessionStore
store = SessionStore(pathlib.Path(sys.argv[1]))
if sys.argv[2]:
    session = store.open(pathlib.Path(sys.argv[2]))
else:
    session = store.create(Conversation(), "other")
print(session.path, flush=True)
for line in sys.stdin:
    turns = session.conversation.turns
    session.user(int(line), 0, "other " + line.strip())
    print("said", flush=True)
session.close()
"""


@contextmanager
def other_window(
    folder: Path, opens: Path | None = None
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Another process with a chat of its own, or with this one open."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder), str(opens or "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    try:
        yield Path(process.stdout.readline().strip()), process
    finally:
        process.communicate()
        assert process.returncode == 0


def say(process: subprocess.Popen[str], turn: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{turn}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "said\n"


def saved(store: SessionStore, *texts: str) -> Path:
    session = store.create(Conversation(), "pair")
    for number, text in enumerate(texts):
        session.user(number, 0, text)
    session.close()
    return session.path


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "chats")


def test_a_chat_open_in_another_process_is_refused_and_loses_nothing(store: SessionStore) -> None:
    path = saved(store, "one")
    with other_window(store.folder, path) as (opened, process):
        assert opened == path
        with pytest.raises(SessionError, match="open in another window") as caught:
            store.open(path)
        assert "start a new chat" in caught.value.next_step
        say(process, 1)
    session = store.open(path)
    assert [turn.current.user for turn in session.conversation.turns] == ["one", "other 1"]
    session.user(2, 0, "three")
    session.close()
    assert len(read(path)[0].turns) == 3


def test_chats_begun_at_the_same_moment_have_files_of_their_own(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "same")
    begun = [store.create(Conversation(str(number)), "pair") for number in range(4)]
    assert len({session.path for session in begun}) == 4
    for session in reversed(begun):
        session.user(0, 0, session.conversation.system)
    for session in begun:
        session.close()
        assert read(session.path)[0].title == session.conversation.system


def test_a_name_taken_without_the_lock_gives_way(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "same")
    session = store.create(Conversation(), "pair")
    session.path.write_text("theirs")
    theirs = session.path
    session.user(0, 0, "mine")
    session.close()
    assert theirs.read_text() == "theirs"
    assert read(session.path)[0].title == "mine"


def test_a_chat_that_said_nothing_leaves_nothing(store: SessionStore) -> None:
    with other_window(store.folder) as (path, _):
        assert path.parent == store.folder
    store.create(Conversation(), "pair").close()
    assert not list(store.folder.iterdir())
    with pytest.raises(SessionError):
        store.open(store.folder / "missing.jsonl")
    assert not list(store.folder.iterdir())


def test_a_chat_is_free_again_after_its_process_was_killed(store: SessionStore) -> None:
    path = saved(store, "one")
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(store.folder), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    store.open(path).close()


def test_a_refused_file_is_let_go_of(store: SessionStore) -> None:
    path = saved(store, "one")
    whole = path.read_bytes()
    path.write_bytes(b"{\n")
    with pytest.raises(SessionError, match="damaged"):
        store.open(path)
    path.write_bytes(whole)
    store.open(path).close()


def test_without_locks_chats_are_saved_all_the_same(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", no_locks)
    path = saved(store, "one")
    session = store.open(path)
    session.user(1, 0, "two")
    session.close()
    assert len(read(path)[0].turns) == 2


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
def test_only_the_owner_may_read_what_was_said(store: SessionStore, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = saved(store, "one")
        assert mode(path) == 0o600
        assert mode(store.folder) == 0o700
        path.chmod(0o644)
        store.folder.chmod(0o755)
        session = store.open(path)
        session.user(1, 0, "two")
        fork = store.fork(Conversation("", [Turn([Version("hi", Answer("yes"))])]), 1, "pair")
        history = store.folder.parent / "prompts.jsonl"
        history.touch(0o644)
        PromptHistory(history).add("secret")
        assert {mode(each) for each in store.folder.iterdir()} == {0o600}
        assert mode(history) == 0o600
        assert mode(store.folder) == 0o700
        session.close()
        fork.close()
    finally:
        os.umask(before)
    assert json.loads(history.read_text()) == "secret"


def test_a_file_that_cannot_be_replaced_leaves_no_second_one(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "x", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
