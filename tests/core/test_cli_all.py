from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_local import cli, demo, fit, paths, places, registry
from dflash_local.cli import COMMANDS, main
from tests.support.hub_server import HubServer
from tests.support.tiny import loop_pair

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def _process(*argv: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "dflash_local", *argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )


@pytest.mark.parametrize("command", [c.name for c in COMMANDS])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert "example:" in capsys.readouterr().out
    assert f"`{command}" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [c.name for c in COMMANDS if c.name != "completion"])
def test_programs_can_read_it(command: str) -> None:
    actions = next(iter(cli.parser()._subparsers._group_actions)).choices[command]._actions  # type: ignore[union-attr,index]
    assert any("--json" in action.option_strings for action in actions)


@pytest.mark.parametrize(
    "argv", [["list"], ["list", "--fits", "--json"], ["du"], ["doctor", "--no-test"], ["--version"]]
)
def test_works_on_a_cp1252_console_without_a_terminal(
    private_folders: Path, argv: list[str]
) -> None:
    done = _process(*argv, encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    done.stdout.decode("cp1252")


SCRIPTS = {
    "dflash-local": ([sys.executable, "-m", "dflash_local"], "--help"),
    "dflash-chat": (
        [sys.executable, "-c", "import sys; from dflash_local.start import chat; sys.exit(chat())"],
        "--keys",
    ),
}
each_script = pytest.mark.parametrize("name", SCRIPTS)


@each_script
def test_a_reader_that_leaves_early_is_no_error(name: str) -> None:
    script, asked = SCRIPTS[name]
    command = [*script, asked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@each_script
def test_a_full_disk_behind_stdout_is_one_line(name: str) -> None:
    with open("/dev/full", "w") as full:
        command = [*SCRIPTS[name][0], "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == [f"{name}: [Errno 28] No space left on device"]


@pytest.mark.parametrize("module", ["dflash_local.cli", "dflash_local.cli_bench", "argparse"])
def test_an_interrupt_while_modules_load_is_one_line(module: str) -> None:
    """As Ctrl+C in the first moments: the interrupt comes in the middle of an import."""
    code = f"""
import sys
from dflash_local.start import main
class Stop:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code, "list"], capture_output=True)
    assert done.returncode == 130
    assert done.stderr.decode().splitlines() == ["dflash-local: stopped"]


def test_letters_that_a_console_lacks_do_no_harm() -> None:
    done = _process("pull", "日本", encoding="cp1252")
    assert done.returncode == 1
    assert b"There is no model called" in done.stderr


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ([], 2),
        (["pull", "nothing"], 1),
        (["generate", "hi", "--model", "demo", "--temperature", "-1"], 2),
        (["rm"], 2),
        (["rm", "org/" + "x" * 300], 1),
        (["pull", "org/" + "x" * 300], 1),
        (["pull", "x" * 300], 1),
        (["add", "Bad Name", "--target", "a/b", "--draft", "a/c"], 2),
    ],
)
def test_exit_codes(private_folders: Path, argv: Sequence[str], code: int) -> None:
    assert main(argv) == code


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "doctor" in script
    assert "partials" in script
    assert "qwen3-coder-30b-a3b" in script


def test_add_then_list_then_rm(
    private_folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target, draft = loop_pair(tmp_path / "pair")
    add = ["add", "mine", "--target", str(target), "--draft", str(draft)]
    assert main(add) == 0
    pair = registry.find("mine")
    assert (pair.kind, pair.draft.source) == ("dflash", "folder")
    assert registry.locate("mine").target_dir == target
    assert main(add) == 2
    assert main([*add, "--title", 'a "title"', "--replace"]) == 0
    assert registry.find("mine").title == 'a "title"'
    assert main(["add", "other", "--target", "org/a", "--draft", "org/b", "--block", "8"]) == 0
    assert set(registry.registry()) >= {"mine", "other", "demo"}
    assert main(["add", "third", "--target", "org/a", "--draft", "org/b"]) == 2
    capsys.readouterr()
    assert main(["list", "--fits", "--json"]) == 0
    mine = next(e for e in json.loads(capsys.readouterr().out) if e["name"] == "mine")
    assert mine["state"] == "ready"
    assert mine["fit"]["fits"] is True
    assert main(["rm", "mine", "--yes"]) == 0
    assert target.is_dir(), "a folder of the user's own stays"


def test_add_asks_the_hub_what_a_pair_needs(
    private_folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for repo, folder in zip(("org/t", "org/d"), loop_pair(tmp_path / "pair"), strict=True):
        server.repos[repo] = {file.name: file.read_bytes() for file in folder.iterdir()}
    add = ["add", "far", "--target", "org/t", "--draft", "org/d", "--weights", "8bit"]
    try:
        assert main(add) == 0
    finally:
        server.close()
    pair = registry.find("far")
    assert (pair.block, pair.context) == (4, 256)
    assert pair.shape is not None
    assert (pair.shape.kv_layers, pair.shape.kv_heads, pair.shape.inner) == (4, 2, 128)
    assert pair.targets[0].approx_bytes == sum(map(len, server.repos["org/t"].values()))
    assert fit.fit_pair(pair, pair.targets[0], backend="torch") is not None
    assert places.find("org/t") is None, "only the config was read"
    capsys.readouterr()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main([*add, "--replace", "--block", "4"]) == 0, "no hub, and the entry is written"
    assert "unknown until it is pulled" in capsys.readouterr().err
    assert registry.find("far").shape is None


def test_rm_and_du_of_what_pull_brought(
    private_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = "z-lab/Qwen3-4B-DFlash-b16"
    home = paths.hub_cache_dir() / ("models--" + repo.replace("/", "--"))
    snapshot = home / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"x" * 5_000_000)
    (home / "blobs").mkdir()
    (home / "blobs" / "ff.dflash-partial").write_bytes(b"x" * 2_000_000)
    assert main(["du", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["partials"] == {"files": 1, "bytes": 2_000_000}
    assert [(m["repo"], m["pairs"]) for m in report["models"]] == [(repo, ["qwen3-4b"])]
    assert main(["rm", "--partials", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed"] == 2_000_000
    assert main(["rm", "qwen3-4b"]) == 2, "no terminal to ask on"
    assert places.find(repo) is not None
    assert main(["rm", "qwen3-4b", "--yes"]) == 0
    assert not home.exists()


def test_pull_refuses_what_can_never_fit(
    private_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dflash_local.free_memory import Room

    small = Room("cpu", "a small machine", 10**9, 10**9)
    monkeypatch.setattr(fit, "room", lambda backend: small)
    assert main(["pull", "qwen3-8b", "--backend", "torch", "--weights", "bf16"]) == 1
    err = capsys.readouterr().err
    assert "1.0 GB free on a small machine" in err
    assert "--anyway" in err


def test_doctor_names_cures(
    private_folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.user_file().parent.mkdir(parents=True)
    registry.user_file().write_text("schema = 2\n")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    bad = [f for f in report["findings"] if f["level"] == "bad"]
    assert [f["topic"] for f in bad] == ["registry"]
    assert all(f["cure"] for f in report["findings"] if f["level"] != "ok")
    assert any(f["topic"] == "self-test" for f in report["findings"])


def test_doctor_says_when_drafting_does_not_pay() -> None:
    from dflash_local.costs import Costs
    from dflash_local.doctor import _drafting
    from dflash_local.events import Round

    # Half of the rounds get one id, a quarter two, an eighth three.
    rounds = [
        Round(1, 3, accepted, (0,) * (accepted + 1), 1.0, None, None, 0)
        for accepted in (0, 1, 0, 2, 0, 1, 0, 3) * 20
    ]
    dear = _drafting(Costs((1.0, 2.0, 3.0, 4.0)), rounds)
    assert dear.level == "warn"
    assert "0.75 times plain at best" in dear.what
    assert "parks the draft" in dear.what
    assert dear.cure
    cheap = _drafting(Costs((1.0, 1.0, 1.1, 1.6)), rounds)
    assert (cheap.level, cheap.cure) == ("ok", "")
    assert "up to 1.6" in cheap.what
    assert "times plain: a round that drafts 2 costs 1.1" in cheap.what
    assert _drafting(Costs((1.0, 0.5)), []).level == "warn", "nothing was drafted"


@pytest.mark.slow
def test_doctor_tests_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    demo.ensure()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ids equal, tau" in out
    assert "drafting: " in out


def test_doctor_replays_the_kernels_of_cards(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    assert main(["doctor", "--replay-kernels", "8b,27b"]) == 0
    table = capsys.readouterr().out
    assert {line.split(" | ")[0] for line in table.splitlines()[2:]} == {"| 8b", "| 27b"}
    assert main(["doctor", "--replay-kernels", "8b", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["slow_share"] == 0 for row in rows if row["rows"] <= 8)
    assert main(["doctor", "--replay-kernels", "9b"]) == 2
    assert "no shapes for '9b'" in capsys.readouterr().err


def test_doctor_warns_where_graphs_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace
    from typing import Any

    from dflash_local import doctor, select
    from dflash_local.backends.scripted import (
        ByteTokenizer,
        ScriptedBackend,
        cycling,
        replies_target,
    )
    from dflash_local.engine import Engine

    def load(model: str, **options: Any) -> Engine:
        script = replies_target(("Parks, shade and trams. " * 9,))
        backend = ScriptedBackend(script, cycling((2,)))
        words = ("lean forward", "no CUDA graphs, kernel by kernel: not permitted")
        backend._info = replace(backend.info, kernels=words)
        return Engine(lambda: (backend, ByteTokenizer()))

    monkeypatch.setattr(demo, "installed", lambda: Path("here"))
    monkeypatch.setattr(select, "load", load)
    found = next(f for f in doctor._self_test() if f.topic == "forward")
    assert found.level == "warn"
    assert "no CUDA graphs, kernel by kernel: not permitted" in found.what
    assert found.cure
