from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dflash_local import demo, paths, places, registry
from dflash_local.errors import NotDownloaded, RegistryError, UnknownModel, WeightsError
from dflash_local.toml_table import line_of

ENTRY = """schema = 1

[pair.mine]
title = "My own pair"
kind = "dflash"
base = "org/base"
block = 8
context = 4096
thinking = "off"
verified = false

[pair.mine.draft]
repo = "org/draft"

[[pair.mine.target]]
backend = "torch"
repo = "org/target-4bit"
weights = "4bit"

[[pair.mine.target]]
backend = "any"
repo = "org/target"
weights = "bf16"
on_load = ["nf4"]
"""


def _user(text: str) -> None:
    registry.user_file().parent.mkdir(parents=True, exist_ok=True)
    registry.user_file().write_text(text, encoding="utf-8")


def _snapshot(repo: str, commit: str, *files: str) -> Path:
    """A snapshot in the hub cache of this test, with ``refs/main`` on it."""
    home = paths.hub_cache_dir() / ("models--" + repo.replace("/", "--"))
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / "main").write_text(commit)
    for name in ("config.json", *files):
        path = home / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return home / "snapshots" / commit


def test_shipped_file_is_valid_and_honest(private_folders: Path) -> None:
    pairs = registry.registry()
    assert next(iter(pairs)) == "demo"
    assert [pair.name for pair in pairs.values() if pair.verified] == ["demo"]
    for pair in pairs.values():
        assert pair.targets_for("mlx") or pair.targets_for("torch"), pair.name
        assert pair.draft.repo != pair.base


def test_shipped_demo_entry_says_what_the_files_say(private_folders: Path) -> None:
    pair = registry.find("demo")
    config = json.loads((demo.draft_folder() / "config.json").read_text(encoding="utf-8"))
    assert pair.block == config["block_size"]
    assert pair.shape is not None
    assert pair.shape.hidden == config["hidden_size"]
    assert pair.targets[0].repo == demo.SOURCE.requirement
    assert pair.targets[0].approx_bytes == demo.SOURCE.wheel_size
    weights = demo.draft_folder() / "model.safetensors"
    assert pair.draft.approx_bytes == weights.stat().st_size


def test_user_entries_add_and_replace(private_folders: Path) -> None:
    _user(ENTRY + ENTRY.split("\n", 2)[2].replace("pair.mine", "pair.demo"))
    pairs = registry.registry()
    assert pairs["mine"].targets_for("torch") == pairs["mine"].targets
    assert pairs["mine"].targets_for("mlx") == pairs["mine"].targets[1:]
    assert pairs["demo"].title == "My own pair"
    assert pairs["demo"].notes == ()
    assert "qwen3-4b" in pairs


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("block = 8", "block = 0", r":7: pair\.mine\.block must be a whole number of at least 1"),
        ("block = 8", "block = true", r":7: pair\.mine\.block must be a whole number"),
        ("block = 8\n", "", r":3: pair\.mine\.block is missing"),
        ("context =", "contxt =", r":8: pair\.mine\.contxt is not a known key \(did you mean con"),
        ('"off"', '"maybe"', r":9: pair\.mine\.thinking must be one of none, off"),
        ("= false", '= "no"', r":10: pair\.mine\.verified must be true or false"),
        ('"org/draft"', "3", r":13: pair\.mine\.draft\.repo must be a text"),
        ('"any"', '"cuda"', r":21: pair\.mine\.target\[1\]\.backend must be one of mlx"),
        ('["nf4"]', '"nf4"', r":24: pair\.mine\.target\[1\]\.on_load must be a list"),
        ('["nf4"]', '["nf5"]', r":24: pair\.mine\.target\[1\]\.on_load may hold nf4"),
        ("[[pair.mine.target]]", "[[pair.mine.targets]]", r":3: pair\.mine\.target is missing"),
        ("[pair.mine.draft]\nrepo =", "draft =", r"pair\.mine\.draft must be a table"),
        ("schema = 1", "schema = 2", r":1: schema must be 1"),
        ("block = 8", "block = = 8", r":7: not valid TOML"),
        ("pair.mine", 'pair."My pair"', r":3: pair\.My pair is no usable name"),
    ],
)
def test_mistakes_are_named_with_line_and_key(
    private_folders: Path, old: str, new: str, message: str
) -> None:
    _user(ENTRY.replace(old, new))
    with pytest.raises(RegistryError, match=message) as caught:
        registry.registry()
    assert str(registry.user_file()) in caught.value.cause


def test_file_that_is_no_text(private_folders: Path) -> None:
    _user("")
    registry.user_file().write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RegistryError, match="not UTF-8"):
        registry.registry()


def test_lines_of_dotted_quoted_and_inline_keys() -> None:
    text = 'a.b = 1\n["x.y".z]\nk = { m = 1 }\n[[t]]\nn = 1\n[[t]]\nn = 2\n'
    assert line_of(text, ("a", "b")) == 1
    assert line_of(text, ("x.y", "z", "k", "m")) == 3
    assert line_of(text, ("t", 1, "n")) == 7
    assert line_of(text, ("nowhere",)) == 1


def test_unknown_names_get_near_ones(private_folders: Path) -> None:
    with pytest.raises(UnknownModel, match="called qwen3-4") as caught:
        registry.find("qwen3-4")
    assert "qwen3-4b" in caught.value.next_step
    assert registry.find("DEMO").name == "demo"
    with pytest.raises(UnknownModel, match="called dmo"):
        registry.locate("dmo")


def test_locate_says_what_to_pull(private_folders: Path) -> None:
    with pytest.raises(NotDownloaded, match="target of demo") as caught:
        registry.locate("demo")
    assert caught.value.next_step == "Run dflash-local pull demo."


def test_locate_finds_a_pair_in_the_hub_cache(private_folders: Path) -> None:
    _user(ENTRY)
    target = _snapshot("org/target", "abc", "model.safetensors")
    with pytest.raises(NotDownloaded, match="draft of mine"):
        registry.locate("mine")
    draft = _snapshot("org/draft", "def", "model.safetensors")
    located = registry.locate("mine")
    assert (located.target_dir, located.draft_dir) == (target, draft)
    assert located == registry.locate(registry.find("mine")) == registry.locate("org/target")
    four_bit = _snapshot("org/target-4bit", "abc", "model.safetensors")
    assert registry.locate("mine").target_dir == four_bit
    assert registry.locate("mine", backend="mlx").target_dir == target
    with pytest.raises(NotDownloaded, match="target of mine"):
        registry.locate("org/base")


def test_incomplete_snapshot_is_not_there(private_folders: Path) -> None:
    _snapshot("org/model", "abc")
    assert places.hub_snapshot("org/model") is None
    folder = _snapshot("org/model", "abc", "a.safetensors")
    assert places.hub_snapshot("org/model") == folder
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert places.hub_snapshot("org/model") is None
    (folder / "b.safetensors").touch()
    assert places.hub_snapshot("org/model") == folder
    assert places.hub_snapshot("org/model", "other") is None


def test_folders_need_no_entry(private_folders: Path) -> None:
    target, draft = private_folders / "t", private_folders / "d"
    for folder in (target, draft):
        folder.mkdir()
    with pytest.raises(WeightsError, match=r"no config\.json"):
        registry.locate(target)
    for folder in (target, draft):
        (folder / "config.json").write_text("{}")
    assert registry.locate(str(target)).draft_dir is None
    located = registry.locate(target, draft)
    assert (located.name, located.draft_dir, located.pair) == ("t", draft, None)
    with pytest.raises(WeightsError, match="no folder"):
        registry.locate(private_folders / "missing")
    with pytest.raises(NotDownloaded, match="dflash-local pull some/repo"):
        registry.locate("some/repo")


def test_nothing_here_starts_a_process_or_a_request(
    private_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("not allowed here")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("socket.socket", refuse)
    for name, pair in registry.registry().items():
        with pytest.raises(NotDownloaded):
            registry.locate(name)
        with pytest.raises(NotDownloaded):
            registry.locate(pair)
