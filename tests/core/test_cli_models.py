from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest

from dflash_local import cli_list, cli_pull, demo
from dflash_local.errors import DownloadError, UnknownModel


def _run(module: ModuleType, *argv: str) -> int:
    parser = argparse.ArgumentParser()
    module.arguments(parser)
    return int(module.run(parser.parse_args(argv)))


@pytest.fixture
def fetched(private_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A demo target that arrives without a download."""
    folder = private_folders / "demo target"

    def ensure(progress: demo.Progress) -> Path:
        for done in range(0, 101, 5):
            progress("download", done * 10**6, 100 * 10**6)
        progress("convert", 5, 5)
        monkeypatch.setattr(demo, "installed", lambda: folder)
        return folder

    monkeypatch.setattr(demo, "ensure", ensure)
    return folder


def test_pull_without_a_terminal_prints_lines(
    fetched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(cli_pull, "demo") == 0
    out, err = capsys.readouterr()
    assert out == f"demo is ready in {fetched}\n"
    assert err.splitlines()[:5] == [f"Downloading: {n} of 100 MB" for n in (0, 25, 50, 75, 100)]
    assert "\x1b" not in err


def test_pull_on_a_terminal_draws_a_bar(
    fetched: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert _run(cli_pull, "demo", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["target"] == str(fetched)
    assert "Converting" in err


def test_pull_of_other_names(private_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownModel):
        _run(cli_pull, "demoo")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids"):
        _run(cli_pull, "qwen3-4b", "--anyway")


@pytest.mark.parametrize("missing", [True, False])
def test_pull_tells_before_the_download_what_the_target_needs(
    missing: bool,
    private_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(cli_pull, "find_spec", lambda name: None if missing else object())
    with pytest.raises(DownloadError):
        _run(cli_pull, "qwen3-4b", "--backend", "torch", "--weights", "nf4", "--anyway")
    told = capsys.readouterr().err
    assert ("bitsandbytes, which is not installed here. Run pip install" in told) == missing


def test_list_prints_a_table_and_json(fetched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(cli_list) == 0
    header, first, *rest = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "STATE", "DRAFT", "BLOCK", "VERIFIED", "MODEL"]
    assert first.split()[:5] == ["demo", "-", "dflash", "8", "yes"]
    assert all(line.isascii() for line in rest)
    demo.ensure(lambda *event: None)
    assert _run(cli_list, "--json") == 0
    entries = json.loads(capsys.readouterr().out)
    assert (entries[0]["name"], entries[0]["state"]) == ("demo", "ready")
    assert entries[0]["targets"][0]["folder"] == str(fetched)
    assert entries[1]["draft"]["folder"] is None
