"""The parts of the screen that are pure: blocks, ribbon, status line, panel, figures."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dflash_local.chat import Answer
from dflash_local.errors import OptionError
from dflash_local.events import Round, Usage
from dflash_local.free_memory import Room
from dflash_local.sampling import SamplingParams
from dflash_local.select import LoadOptions, PairOpener
from dflash_local.stats import DraftStats, PositionRate, StatsSummary
from dflash_local.tui import app, clipboard, figures, machine
from dflash_local.tui.app import parser
from dflash_local.tui.blocks import BlockScanner
from dflash_local.tui.chat_settings import SETTINGS
from dflash_local.tui.commands import REGISTRY
from dflash_local.tui.goodbye import Given, command_to_go_on
from dflash_local.tui.help import CHAT_FILE, help_text, keys_help, keys_name
from dflash_local.tui.key_line import key_line
from dflash_local.tui.machine import fits, memory_here, space_here
from dflash_local.tui.offer import offer
from dflash_local.tui.ribbon import Cell, level, ribbon
from dflash_local.tui.settings import Settings
from dflash_local.tui.stats_panel import PanelValues, bar, panel
from dflash_local.tui.status_line import Status, status
from dflash_local.tui.themes import of_terminal

PARSER = MarkdownIt("gfm-like", {"html": False, "linkify": False})
LINES = st.sampled_from(
    [
        "text",
        "",
        "- item",
        "- ```",
        "  more of it",
        "1. first",
        "```",
        "```python",
        "    ```",
        "~~~",
        "# heading",
        "> quote",
        "| a | b |",
        "|---|---|",
        "    indented",
        "---",
        "  ```",
        "* star with a long text behind it",
    ]
)


def rendered(text: str) -> list[tuple[str, str]]:
    return [(token.type, token.content) for token in PARSER.parse(text)]


def scanned(text: str, sizes: list[int]) -> list[int]:
    scanner, starts, at = BlockScanner(), list[int](), 0
    for size in [*sizes, len(text)]:
        starts += scanner.push(text[at : at + size])
        at += size
    return starts


@settings(deadline=None, max_examples=400)
@given(st.lists(LINES, max_size=14), st.lists(st.integers(1, 9), max_size=12))
@example(["- item", "  ```", "text", "  ```", "", "text"], [])
def test_cutting_at_the_boundaries_changes_nothing_shown(
    lines: list[str], sizes: list[int]
) -> None:
    text = "\n".join(lines) + "\n"
    starts = scanned(text, sizes)
    assert starts == sorted(set(starts))
    edges = [0, *starts, len(text)]
    apart: list[tuple[str, str]] = []
    for left, right in pairwise(edges):
        apart += rendered(text[left:right])
    assert apart == rendered(text)


def test_boundaries_are_found_where_it_matters() -> None:
    text = "Para one is here.\n\nPara two is here.\n\n```py\nx\n\ny\n```\nAfter the code.\n"
    starts = scanned(text, [7] * 20)
    assert [text[s:].split()[0] for s in starts] == ["Para", "```py", "After"]


def test_the_ribbon_has_a_fixed_scale() -> None:
    assert [level(n, 8) for n in (0, 1, 8, 99)] == [0, 0, 7, 7]
    cells = [Cell(1, 7, 0), Cell(8, 7, 7), Cell(4, 7, 3), Cell(1, 0, 0)]
    assert ribbon(cells, 8, 10).plain == "▁█▄▁"
    assert ribbon(cells, 8, 2).plain == "▄▁"
    assert ribbon(cells, 8, 10, ascii_only=True).plain.isascii()
    assert [cell.kind for cell in cells] == ["none", "full", "part", "plain"]


FULL = Status(
    tok_s=142.0,
    ratio=3.1,
    estimated=False,
    tau=5.4,
    draft_rate=0.78,
    cells=tuple(Cell(n % 8 + 1, 7, n % 8) for n in range(90)),
    block=8,
    position=2100,
    context=32000,
    memory=9_800_000_000,
    pair="Qwen3-8B 4bit + DFlash b16 · mlx",
)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 160])
def test_the_status_line_fits_and_keeps_the_first_four(width: int) -> None:
    line = status(FULL, width).plain
    assert line.startswith("142 tok/s  3.1×  τ 5.4  78%")
    assert len(line) <= max(width, len("142 tok/s  3.1×  τ 5.4  78%"))
    assert ("ctx 2.1k/32k" in line) == (width >= 60)
    assert ("Qwen3" in line) == (width >= 100)


def test_the_status_line_in_ascii() -> None:
    line = status(FULL, 60, ascii_only=True).plain
    assert line.isascii()


def summary() -> StatsSummary:
    stats = DraftStats()
    for n in range(12):
        stats.add(Round(n + 1, 7, n % 8, tuple(range(n % 8 + 1)), 20.0, 5.0, 14.0, 100))
    return stats.summary()


@pytest.mark.parametrize("width", [60, 110, 160])
def test_the_panel_shows_each_figure(width: int) -> None:
    text = panel(PanelValues(summary(), 142.3, 45.9), "full", width).plain
    for part in ("142.3 tok/s", "plain 45.9", "3.1×", "n 12", "tokens per round", "verify 70%"):
        assert part in text
    assert len(panel(PanelValues(summary()), "compact", width).plain.splitlines()) == 2


def test_few_rounds_are_dim() -> None:
    few = StatsSummary(positions=(PositionRate(1, 2, 3),))
    assert any(span.style == "dim" for span in panel(PanelValues(few), "full", 60).spans)


def test_bars() -> None:
    assert bar(1.0, 4) == "████"
    assert bar(0.0, 4) == ""
    assert bar(0.5, 4, ascii_only=True) == "##"


def test_figures_are_worded_once() -> None:
    assert [figures.count(n) for n in (950, 2100, 32000)] == ["950", "2.1k", "32k"]
    assert [figures.seconds(s) for s in (0.31, 4.1, 72)] == ["0.31 s", "4.1 s", "1 min 12 s"]
    assert figures.gigabytes(9_800_000_000) == "9.8 GB"
    assert figures.speed(5.25).endswith("tok/s")


def test_code_blocks_are_found() -> None:
    text = "a\n```py\none\n```\n\n- b\n  ```\n  two\n  ```\n\n```\nopen"
    assert [block.strip() for block in clipboard.code_blocks(text)] == ["one", "two", "open"]


def test_the_clipboard_is_the_machines_own_unless_over_ssh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("sys.platform", "linux")
    assert clipboard.tool({"WAYLAND_DISPLAY": "w"}) == ("wl-copy",)
    assert clipboard.tool({"DISPLAY": ":0"})[0] == "xclip"
    assert clipboard.tool({"DISPLAY": ":0", "SSH_TTY": "x"}) == ()
    assert clipboard.tool({}) == ()
    monkeypatch.setattr("sys.platform", "darwin")
    assert clipboard.tool({}) == ("pbcopy",)


def test_without_a_tool_the_terminal_is_asked_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clipboard, "tool", lambda: ())
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setenv("TERM_PROGRAM", "Apple_Terminal")
    taken: list[str] = []
    assert "takes no copies" in clipboard.copy("x", taken.append)
    assert taken == ["x"]


def test_what_fits() -> None:
    from dflash_local.registry import registry

    assert memory_here() >= 0
    assert space_here().free > 0

    def room(size: int) -> Room:
        return Room("cpu", "a test", size, size)

    demo, large = registry()["demo"], registry()["qwen3-coder-30b-a3b"]
    assert fits(demo, demo.targets[0], room(2_000_000_000))
    assert not fits(demo, demo.targets[0], room(100_000_000))
    # The download's size is not known, what it takes when loaded is.
    assert not large.targets[0].approx_bytes
    assert fits(large, large.targets[0], room(10**12))
    assert not fits(large, large.targets[0], room(10**10))


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_an_offer_is_of_the_target_that_would_be_pulled(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_local import registry, select

    for module in (select, machine):
        monkeypatch.setattr(module, "backend_name", lambda asked=None: backend)
    machine.space_here.cache_clear()
    monkeypatch.setattr(registry, "files_dir", lambda files: None)
    pairs = registry.registry().values()
    for pair in pairs:
        offered, targets = offer(pair), pair.targets_for(backend)
        assert offered.possible == bool(targets)
        if not targets:
            assert "not for this machine" in offered.line
            continue
        sizes = [targets[0].approx_bytes, pair.draft.approx_bytes]
        assert offered.download == (sum(sizes) if all(sizes) else 0)
        assert ("size unknown" in offered.line) == (not all(sizes))
        assert bool(offered.question) == (not all(sizes) or sum(sizes) > 1e9)
    assert not all(offer(pair).possible for pair in pairs) or backend == "mlx"
    machine.space_here.cache_clear()


PARKED = StatsSummary(rounds=30, plain_rounds=26, tokens=43, drafted=20, accepted=8, tau=4.0)


def test_parked_drafting_is_told_instead_of_its_few_rounds() -> None:
    usage = Usage(9, 0, 44, 0, 10.0, 1000.0)
    answer = Answer(end="stop", usage=usage, stats=PARKED, speedup=0.7)
    mostly = replace(answer, stats=replace(PARKED, plain_rounds=10))
    for words in (figures.footer, figures.sentence):
        assert "drafting parked" in words(answer)
        assert "accepted" not in words(answer)
        assert "drafting parked" not in words(mostly)
        assert "accepted" in words(mostly)
    values = Status(tok_s=8.1, ratio=0.7, tau=4.0, draft_rate=0.43, parked=True)
    assert status(values, 100).plain.startswith("8.1 tok/s  0.7× est.  parked: drafting does not")
    assert "4.0" not in status(values, 100).plain
    assert status(values, 40).plain == "8.1 tok/s  0.7× est.  parked"
    for mode in ("compact", "full"):
        assert figures.PARKED in panel(PanelValues(PARKED, parked=True), mode, 100).plain
        assert figures.PARKED not in panel(PanelValues(PARKED), mode, 100).plain


def test_a_narrow_panel_has_one_column() -> None:
    rates = tuple(PositionRate(number, 5, 9) for number in range(1, 9))
    summary = replace(PARKED, positions=rates, histogram=(0, 3, 4, 5))
    assert " | " in panel(PanelValues(summary), "full", 80).plain
    lines = panel(PanelValues(summary), "full", 44).plain.splitlines()
    assert sum(line.startswith("d") for line in lines) == 8
    assert all(len(line) <= 42 and "|" not in line for line in lines[2:])


@pytest.mark.parametrize("generating", [False, True])
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_key_line_shows_whole_keys_and_the_first_ones_always(
    width: int, generating: bool
) -> None:
    line = key_line(width - 2, generating=generating)
    assert len(line) <= width - 2
    parts = line.split(" · ")
    assert {"Ctrl+J new line", "F1 help"} <= set(parts)
    assert ("/ commands" in parts) == (not generating or width >= 80)
    assert ("Esc stop" in parts) == (generating or width >= 80)
    assert ("Enter queue" if generating else "Enter send") in parts
    assert ("Ctrl+D quit" in parts) == (width >= 80)
    whole = key_line(1000, generating=generating).split(" · ")
    assert parts == whole[: len(parts)]


def test_the_key_line_follows_the_users_keys() -> None:
    line = key_line(80, keymap={"view.help": "f5,f6"}, enter_sends=False)
    assert line.startswith("Ctrl+J send · Enter new line")
    assert "F5 help" in line


def test_keys_are_written_as_people_write_them() -> None:
    names = keys_name("ctrl+end,shift+up,alt+left,ctrl+r,f1,pageup,y,shift+enter")
    assert names == "Ctrl+End, Shift+Up, Alt+Left, Ctrl+R, F1, PageUp, y, Shift+Enter"


def test_the_help_lists_every_key_command_setting_and_figure() -> None:
    shown = " ".join(help_text(REGISTRY, {"view.help": "f5"}).split())
    for action in REGISTRY.actions:
        assert not action.keys or action.title in shown
        assert not action.slash or f"/{action.slash}" in shown
        assert f"[{action.id}]" not in shown
    assert "F5 Help" in shown
    for setting in SETTINGS:
        assert f"/set {setting.name} {setting.meaning}" in shown
    assert {setting.field for setting in SETTINGS} <= {f.name for f in fields(SamplingParams)}
    assert set(CHAT_FILE) == {f.name for f in fields(Settings)}
    assert all(f"{name} {words}" in shown for name, words in CHAT_FILE.items())
    for figure in ("tau", "draft rate", "d_i", "full blocks", "tok/s", "x", "first token"):
        assert f" {figure}: " in shown
    lines, _, told = help_text(REGISTRY, {}).partition("FIGURES\n")
    assert all(len(line) < 100 for line in lines.splitlines())
    # One line a figure: the screen breaks it where it ends.
    assert all(": " in line[:20] and "*" not in line for line in told.splitlines())


def test_every_action_can_be_given_another_key() -> None:
    listed = [line.split()[0] for line in keys_help(REGISTRY, {})]
    assert listed == ["prompt.send", "prompt.newline", *(a.id for a in REGISTRY.actions)]


@pytest.mark.parametrize(
    ("variable", "light"),
    [("0;15", True), ("0;default;15", True), ("0;7", True), ("15;0", False), ("7;8", False)],
)
def test_the_theme_follows_the_terminal(variable: str, light: bool) -> None:
    assert (of_terminal({"COLORFGBG": variable}) == "textual-light") == light
    assert of_terminal({}) == of_terminal({"COLORFGBG": "odd"}) == "textual-dark"


def test_the_command_to_go_on_works_from_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "my project" / ".venv" / "bin" / "dflash-chat"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho ran $@ > {shlex.quote(str(tmp_path / 'said'))}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.defpath)
    for folder in (tmp_path, tmp_path / "my project", program.parent, Path("/")):
        monkeypatch.chdir(folder)
        command = command_to_go_on("a pair", started=str(program))
        subprocess.run(command, shell=True, check=True)
        assert (tmp_path / "said").read_text() == "ran --continue --model a pair\n"
        (tmp_path / "said").unlink()
    monkeypatch.chdir(tmp_path / "my project")
    assert command_to_go_on("demo", started=str(program)) == ".venv/bin/dflash-chat --continue"
    monkeypatch.setenv("PATH", str(program.parent))
    assert command_to_go_on("demo", started=str(program)) == "dflash-chat --continue"
    module = command_to_go_on("demo", started="/somewhere/app.py")
    assert module == shlex.join([sys.executable, "-m", "dflash_local.tui.app", "--continue"])


def test_the_chat_loads_as_its_arguments_say(monkeypatch: pytest.MonkeyPatch) -> None:
    openers: list[PairOpener] = []

    def run(opener: PairOpener, *others: object) -> int:
        openers.append(opener)
        return 0

    monkeypatch.setattr(app, "run", run)
    line = "--backend torch --dtype fp32 --threads 1 --kv-bits 8 --draft none --context 640"
    assert app.main(shlex.split(line)) == 0
    expected = LoadOptions(backend="torch", dtype="fp32", threads=1, kv_bits=8, context=640)
    assert openers == [PairOpener("demo", "none", expected)]
    assert app.main(["--kv-bits", "8", "--threads", "0"]) == OptionError.exit_code


@pytest.mark.parametrize(
    ("line", "pair", "again"),
    [
        ("--draft drafts/mine", "demo", "--draft drafts/mine"),
        ("--model qwen3-4b --draft none", "qwen3-4b", "--model qwen3-4b --draft none"),
        ("--draft drafts/mine", "qwen3-4b", "--model qwen3-4b"),  # switched in the chat
        (
            "--context 512 --backend torch --plain --no-mouse hello",
            "demo",
            "--backend torch --context 512 --plain --no-mouse",
        ),
        (
            "--threads 1 --draft-bits 8 --quantize nf4",
            "demo",
            "--threads 1 --quantize nf4 --draft-bits 8",
        ),
        ("--block off", "demo", "--block 0"),
        ("--continue --system Hi", "demo", ""),
    ],
)
def test_going_on_loads_what_was_loaded(line: str, pair: str, again: str) -> None:
    command = command_to_go_on(pair, Given.of(parser().parse_args(shlex.split(line))))
    words = command.partition(" --continue")[2].strip()
    assert words == again
    once_more = parser().parse_args(["--continue", *shlex.split(words)])
    assert command_to_go_on(pair, Given.of(once_more)) == command
