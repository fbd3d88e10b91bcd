"""Variables and models.toml that cannot be meant: one line that names them, never a trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
import pytest

from dflash_local import doctor, hub, paths, places, registry
from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.cli import main
from dflash_local.errors import DownloadError, OptionError, RegistryError
from dflash_local.hub_cache import RepoFolder
from dflash_local.pairs import Files
from dflash_local.service import Service

NOBODY = "~nosuchuser/x"


def one_line(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> str:
    """What a command that fails says last, all of it in one line."""
    assert main(argv) in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    return lines[-1]


@pytest.mark.parametrize(
    ("variable", "argv"),
    [
        ("HF_HUB_CACHE", ["list"]),
        ("HF_HOME", ["list"]),
        ("DFLASH_CACHE", ["pull", "demo"]),
        ("DFLASH_CONFIG", ["list"]),
        ("DFLASH_CONFIG", ["add", "x", "--target", "a/b", "--draft", "a/c", "--block", "8"]),
        ("DFLASH_DATA", ["list"]),
    ],
)
def test_the_home_of_nobody_is_named(
    private_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    argv: list[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if variable == "HF_HOME":
        monkeypatch.delenv("HF_HUB_CACHE")
    if variable == "DFLASH_DATA":  # the record of what was pulled is read for a repository here
        (RepoFolder("z-lab/Qwen3-4B-DFlash-b16").home / "snapshots").mkdir(parents=True)
    monkeypatch.setenv(variable, NOBODY)
    assert f"{variable}: {NOBODY}" in one_line(capsys, argv)


@pytest.mark.parametrize("variable", ["DFLASH_CACHE", "DFLASH_CONFIG", "DFLASH_DATA", "DFLASH_LOG"])
def test_every_folder_of_ours_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, NOBODY)
    folder = getattr(paths, f"{variable.removeprefix('DFLASH_').lower()}_dir")
    with pytest.raises(OptionError, match=f"^\\W*{variable}: {NOBODY}"):
        folder()


def test_an_account_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert paths.lm_studio_dirs() == ()
    with pytest.raises(OptionError, match="HF_HOME"):
        paths.hub_cache_dir()


def test_a_log_folder_of_nobody_ends_no_service_with_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DFLASH_LOG", NOBODY)
    with pytest.raises(OptionError, match="DFLASH_LOG"):
        Service(ScriptedOpener())


ADDRESSES = (
    "http://[bad",
    "http://a:99999",
    "http://a:0",
    "http://a:b",
    "http://a\nb",
    "http://a b",
    "http://",
    "a.b",
    "ftp://a",
    "http://a..b",
    f"http://{'a' * 70}",
    "\n",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_endpoint_that_is_no_address(
    private_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    address: str,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert "HF_ENDPOINT is " in one_line(capsys, ["pull", "org/name"])
    with pytest.raises(DownloadError, match="HF_ENDPOINT"):
        hub.session()
    (found,) = (f for f in doctor._network() if f.topic == "hub")
    assert (found.level, "HF_ENDPOINT" in found.what) == ("bad", True)


@pytest.mark.parametrize(
    "address", ["http://a", "https://a.b:8443/x/", "http://[::1]:80", "https://hub_1.ä.de"]
)
def test_an_endpoint_that_is_one(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert hub.endpoint() == address.rstrip("/")


@pytest.mark.parametrize("address", ["http://me:secret@127.0.0.1:9", "htp://me:secret@host"])
def test_a_password_in_the_endpoint_is_not_shown(
    private_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    address: str,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    told = one_line(capsys, ["pull", "org/name"])
    found = [f.what for f in doctor._network()]
    for text in (told, *found):
        assert "secret" not in text
        assert "me:" not in text
    assert address.rpartition("@")[2] in told


def test_a_proxy_that_is_none(
    private_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    huggingface_hub.close_session()
    monkeypatch.setenv("HTTPS_PROXY", "nonsense://x")
    try:
        assert "The proxy cannot be used" in one_line(capsys, ["pull", "org/name"])
    finally:
        huggingface_hub.close_session()


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "{a=" * 5000])
def test_nesting_without_end(
    private_folders: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    registry.user_file().parent.mkdir(parents=True)
    registry.user_file().write_text(text)
    assert places.own_folders() == ()
    for argv in (["list"], ["add", "x", "--target", "a/b", "--draft", "a/c", "--block", "8"]):
        assert str(registry.user_file()) in one_line(capsys, argv)


def test_what_is_no_file_is_not_passed_over(private_folders: Path) -> None:
    file = registry.user_file()
    file.mkdir(parents=True)
    with pytest.raises(RegistryError, match="is no file"):
        registry.registry()
    file.rmdir()
    file.symlink_to("nowhere")
    with pytest.raises(RegistryError, match="cannot be read"):
        registry.registry()


def test_own_folders_that_cannot_be_are_none(private_folders: Path, tmp_path: Path) -> None:
    registry.user_file().parent.mkdir(parents=True)
    entry = f'["{NOBODY}", "a\\u0000b", "{tmp_path}"]'
    registry.user_file().write_text(f"schema = 1\nfolders = {entry}\n")
    assert places.own_folders() == (tmp_path,)
    assert registry.files_dir(Files(repo=NOBODY, source="folder")) is None


def test_a_shipped_name_is_taken_over_with_a_word(
    private_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    add = ["--target", "org/a", "--draft", "org/b", "--block", "8"]
    assert main(["add", "mine", *add]) == 0
    assert "shipped" not in capsys.readouterr().err
    assert main(["add", "demo", *add]) == 0
    assert "demo now stands for this entry" in capsys.readouterr().err
    assert registry.find("demo").base == "org/a"
