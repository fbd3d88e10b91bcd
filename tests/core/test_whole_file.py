"""A file is there whole, whoever else writes it and however it is named."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_local.whole_file import write_whole

posix = pytest.mark.skipif(os.name != "posix", reason="permissions and links of POSIX")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_writers_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    texts = [letter * 20_000 for letter in "abcd"]

    def write(text: str) -> None:
        for _ in range(50):
            write_whole(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write, texts))
    assert [file.name for file in tmp_path.iterdir()] == ["settings.json"]


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chat.json"
    write_whole(path, "old")

    def refuse(*names: object) -> None:
        raise OSError("refused")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="refused"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@posix
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    kept, link = tmp_path / "dotfiles" / "models.toml", tmp_path / "models.toml"
    kept.parent.mkdir()
    kept.write_text("old")
    link.symlink_to(kept)
    write_whole(link, "new")
    assert link.is_symlink()
    assert kept.read_text() == "new"


@posix
def test_what_was_closed_to_others_stays_closed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    before = os.umask(0o022)
    try:
        write_whole(path, "1")
        assert mode(path) == 0o644
        write_whole(path, "2", 0o600)
        assert mode(path) == 0o600
        write_whole(path, "3")
        assert mode(path) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["x" * 255, "ж" * 127])
def test_the_longest_names_can_be_written(tmp_path: Path, name: str) -> None:
    write_whole(tmp_path / "new" / name, "text")
    assert (tmp_path / "new" / name).read_text() == "text"
