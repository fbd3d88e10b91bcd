"""Every flag and every field arrives where it acts; nothing is taken and dropped."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local import bench_plot, bench_prompts, cli, select, tokenizer
from dflash_local.backends.scripted import (
    ByteTokenizer,
    ScriptedBackend,
    cycling,
    replies_target,
)
from dflash_local.errors import OptionError
from dflash_local.lookup import Found
from dflash_local.prompting import Message
from dflash_local.sampling import SamplingParams
from dflash_local.select import LoadOptions


@dataclass
class Seen:
    """What reached loader, backend and tokenizer."""

    load: dict[str, Any] = field(default_factory=dict)
    sampling: list[SamplingParams] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    rendered: list[tuple[list[Message], bool | None]] = field(default_factory=list)


class Spy:
    """A scripted backend that says yes to every setting and notes it."""

    def __init__(self, seen: Seen) -> None:
        script = replies_target(("A long answer. " * 9,))
        self._inner, self._seen = ScriptedBackend(script, cycling((2,)), context=4096), seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def configure(self, sampling: SamplingParams) -> None:
        self._seen.sampling.append(sampling)

    def propose(self, pending: int, count: int, found: Found) -> Any:
        self._seen.counts.append(count)
        return self._inner.propose(pending, count, found)


class Tokens:
    """A byte tokenizer that notes what it renders."""

    def __init__(self, seen: Seen) -> None:
        self._inner, self._seen = ByteTokenizer(), seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def render(self, messages: Sequence[Message], thinking: bool | None) -> Any:
        self._seen.rendered.append((list(messages), thinking))
        return self._inner.render(messages, thinking)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seen:
    """Commands run on a scripted pair."""
    found = Seen()
    monkeypatch.setattr(select, "costs_of", lambda backend: None)

    def locate(model: str, draft: str | None, *, backend: str) -> SimpleNamespace:
        found.load |= {"model": model, "draft": draft, "backend": backend}
        return SimpleNamespace(target_dir=tmp_path, draft_dir=tmp_path)

    def open_pair(target: Path, draft: Path | None, options: LoadOptions, progress: Any) -> Spy:
        found.load |= {"options": options}
        return Spy(found)

    monkeypatch.setattr(select, "locate", locate)
    monkeypatch.setattr(select, "import_module", lambda n: SimpleNamespace(open_pair=open_pair))
    monkeypatch.setattr(select, "find_spec", lambda name: True)
    monkeypatch.setattr(tokenizer, "HubTokenizer", lambda folder: Tokens(found))
    return found


SAMPLING: dict[str, tuple[str, str, Any]] = {
    "--max-tokens": ("9", "max_tokens", 9),
    "--temperature": ("0.7", "temperature", 0.7),
    "--draft-temperature": ("0.4", "draft_temperature", 0.4),
    "--top-p": ("0.8", "top_p", 0.8),
    "--top-k": ("5", "top_k", 5),
    "--min-p": ("0.1", "min_p", 0.1),
    "--seed": ("7", "seed", 7),
    "--repetition-penalty": ("1.2", "repetition_penalty", 1.2),
    "--presence-penalty": ("0.3", "presence_penalty", 0.3),
    "--frequency-penalty": ("0.4", "frequency_penalty", 0.4),
    "--stop": ("END", "stop", ("END",)),
}
OPTIONS: dict[str, tuple[str, str, Any]] = {
    "--dtype": ("fp32", "dtype", "fp32"),
    "--context": ("99", "context", 99),
    "--threads": ("1", "threads", 1),
    "--quantize": ("nf4", "quantize", "nf4"),
    "--draft-bits": ("4", "draft_bits", 4),
    "--head-bits": ("8", "head_bits", 8),
    "--draft-window": ("64", "draft_window", 64),
    "--kv-bits": ("8", "kv_bits", 8),
    "--embed-bits": ("16", "embed_bits", 16),
}
PLACES: dict[str, tuple[str, str, Any]] = {
    "--model": ("other", "model", "other"),
    "--draft": ("/some/draft", "draft", "/some/draft"),
    "--backend": ("mlx", "backend", "mlx"),
}
GENERATE = {
    *("--plain", "--block", "--no-tree", "--no-lookup"),
    *("--think", "--no-think", "--system", "--json"),
}
BENCH = {
    *("--prompts", "--set", "--repeats", "--max-tokens", "--block", "--sweep", "--depths"),
    *("--temperature", "--seed", "--think", "--no-think", "--json", "--markdown", "--plot"),
    *("--no-tree", "--no-lookup"),
}


def flags(command: str) -> set[str]:
    """The long options of a command."""
    root = cli.parser()
    subs = next(a for a in root._actions if isinstance(a, argparse._SubParsersAction))
    actions = subs.choices[command]._actions
    return {a.option_strings[0] for a in actions if a.option_strings} - {"-h", "--help"}


def test_every_flag_of_generate_is_tested_here() -> None:
    known = GENERATE | SAMPLING.keys() | PLACES.keys() | OPTIONS.keys()
    assert flags("generate") <= known
    assert flags("generate") >= GENERATE | SAMPLING.keys() | PLACES.keys()


def test_every_flag_of_bench_is_tested_here() -> None:
    assert flags("bench") <= BENCH | PLACES.keys() | OPTIONS.keys()
    assert flags("bench") >= BENCH


def test_every_field_of_the_sampling_has_a_flag() -> None:
    names = {f.name for f in fields(SamplingParams)}
    assert {name for _, name, _ in SAMPLING.values()} == names - {
        "acceptance",
        "branching",
        "lookup",
    }


@pytest.mark.parametrize("command", [["generate", "hi"], ["bench", "--prompts", "1"]])
@pytest.mark.parametrize("asked", [[], ["--no-tree"], ["--no-lookup"]])
def test_drafts_come_about_as_asked(seen: Seen, command: list[str], asked: list[str]) -> None:
    assert cli.main([*command, *asked]) == 0
    ways = {(sampling.branching, sampling.lookup) for sampling in seen.sampling}
    assert ways == {("--no-tree" not in asked, "--no-lookup" not in asked)}


def test_every_field_of_the_load_options_is_tested_here() -> None:
    known = {name for _, name, _ in OPTIONS.values()} | {"backend"}
    assert {f.name for f in fields(LoadOptions)} == known


@pytest.mark.parametrize("flag", SAMPLING)
def test_a_sampling_flag_reaches_the_backend(seen: Seen, flag: str) -> None:
    value, name, expected = SAMPLING[flag]
    assert cli.main(["generate", "hi", flag, value]) == 0
    assert getattr(seen.sampling[-1], name) == expected
    default = SamplingParams()
    others = {f.name for f in fields(default)} - {name}
    assert all(getattr(seen.sampling[-1], n) == getattr(default, n) for n in others)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (command, flag)
        for command in ("generate", "bench")
        for flag in (*PLACES, *OPTIONS)
        if flag in flags(command)
    ],
)
def test_a_loading_flag_reaches_the_loader(seen: Seen, command: str, flag: str) -> None:
    value, name, expected = {**PLACES, **OPTIONS}[flag]
    prompt = ["hi"] if command == "generate" else ["--prompts", "1", "--max-tokens", "4"]
    cli.main([command, *prompt, flag, value])
    where = seen.load if flag in PLACES else seen.load["options"]
    found = where[name] if isinstance(where, dict) else getattr(where, name)
    assert found == expected


def test_the_flags_of_generate_alone(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["generate", "hi", "--plain"])
    assert set(seen.counts) == {0}
    seen.counts.clear()
    cli.main(["generate", "hi", "--block", "3"])
    assert max(seen.counts) == 2
    for argv, thinking in ((["--think"], True), (["--no-think"], False), ([], None)):
        cli.main(["generate", "hi", *argv])
        assert seen.rendered[-1][1] is thinking
    cli.main(["generate", "hi", "--system", "Be brief."])
    assert [message["role"] for message in seen.rendered[-1][0]] == ["system", "user"]
    capsys.readouterr()
    cli.main(["generate", "hi", "--json", "--max-tokens", "5"])
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 5


def test_a_prompt_comes_from_a_pipe(
    seen: Seen, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argv in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello from a pipe."))
        assert cli.main(["generate", *argv, "--max-tokens", "2"]) == 0
        assert seen.rendered[-1][0][-1]["content"] == "Hello from a pipe."
    monkeypatch.setattr(sys, "stdin", io.StringIO(" "))
    assert cli.main(["generate"]) == 2
    assert "pipe it in" in capsys.readouterr().err


def test_the_flags_of_bench_alone(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "bench",
        "--set",
        "own",
        "--prompts",
        "2",
        "--max-tokens",
        "6",
        "--block",
        "4",
        "--json",
    ]
    assert cli.main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["prompt_count"], report["max_tokens"], report["block"]) == (2, 6, 4)
    assert report["prompts"] == bench_prompts.prompts_hash(bench_prompts.chosen(2, "own"))
    assert all(s.greedy for s in seen.sampling)
    assert max(seen.counts) == 3
    seen.sampling.clear()
    assert cli.main([*argv, "--temperature", "0.9", "--seed", "40"]) == 0
    sampled = json.loads(capsys.readouterr().out)
    names = [way["name"] for way in sampled["ways"]]
    assert names[:2] == ["plain", "rejection"]
    assert "compare" in names
    asked = seen.sampling[2:]  # behind the warm-up
    assert {s.temperature for s in asked} == {0.9}
    assert {s.seed for s in asked} == {40, 41}
    assert {(s.acceptance, s.draft_temperature) for s in asked} == {
        ("rejection", None),
        ("rejection", 0.0),
        ("compare", None),
        ("compare", 0.0),
    }
    tokens = len(bench_prompts.chosen(2, "own")) * 5
    assert all(way["tokens"] == tokens for way in sampled["ways"])
    assert sampled["ways"][1]["tau"] > 1


def test_the_modes_of_bench(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["bench", "--max-tokens", "6", "--json"]

    def report(*argv: str) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main([*short, *argv]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    plain = report("--set", "chat,code", "--set", "maths", "--prompts", "1", "--repeats", "3")
    assert [kind["kind"] for kind in plain["kinds"]] == ["chat", "code", "maths"]
    assert (plain["repeats"], plain["prompt_count"]) == (3, 3)
    sweep = report("--sweep", "--set", "chat,code", "--prompts", "1")
    assert list(sweep["quotient"]) == ["chat", "code"]
    depths = report("--depths", "300,700", "--no-think")
    assert [round(d["depth"], -2) for d in depths["depths"]] == [300, 700]
    assert seen.load["options"].context > 700
    assert depths["thinking"] is seen.rendered[-1][1] is False
    assert report("--prompts", "1", "--think")["thinking"] is True


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--set", "nothing"], "there is no set 'nothing'"),
        (["--set", "chat", "--prompts", "11"], "has 1 to 10"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--depths", "many"], "no list of whole numbers"),
        (["--depths", "64,0"], "0 is no depth"),
        (["--sweep", "--depths", "64"], "exclude each other"),
        (["--sweep", "--block", "4"], "Leave --block out"),
        (["--depths", "64", "--repeats", "2"], "--repeats does not go with --depths"),
        (["--depths", "20"], "less than the question alone"),
        (["--depths", "9000", "--context", "512"], "a context of 9"),
        (["--seed", "3"], "--temperature above 0"),
        (["--plot", "figure.txt"], "no name of a picture"),
        (["--json", "--markdown"], "not allowed with"),
    ],
)
def test_what_cannot_be_benched_is_told_in_one_line(
    seen: Seen,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(bench_plot, "find_spec", lambda name: True)
    with suppress(SystemExit):  # argparse leaves by itself
        assert cli.main(["bench", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_person_can_read_the_sampled_report(
    seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "--prompts", "1", "--max-tokens", "6", "--temperature", "1"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "rejection" in out
    assert "temperature 1" in out


@pytest.mark.parametrize(
    ("backend", "scheme", "others"),
    [("torch", "4bit", "nf4, int8, none"), ("mlx", "nf4", "4bit, 8bit, none")],
)
def test_a_quantisation_of_the_other_backend_is_refused_with_what_can_be_typed(
    backend: str,
    scheme: str,
    others: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: object())
    argv = ["generate", "--backend", backend, "--quantize", scheme, "--model", "/nowhere", "hi"]
    assert cli.main(argv) == OptionError.exit_code
    told = capsys.readouterr().err
    assert f"Give one of {others}." in told
    assert len(told.splitlines()) == 1
    for other in others.split(", "):
        assert cli.main([*argv[:4], other, *argv[5:]]) != 0
        told = capsys.readouterr().err
        assert "quantisation" not in told
        assert "invalid choice" not in told


@pytest.mark.parametrize("threads", [0, (os.cpu_count() or 1024) + 1, 10**12])
def test_threads_that_the_machine_has_not_are_refused(threads: int) -> None:
    """A thread too many waits for a core that another one holds, at every operator."""
    with pytest.raises(OptionError, match=f"Give 1 to {os.cpu_count() or 1024}"):
        LoadOptions(threads=threads)


@pytest.mark.parametrize(("flag", "value"), [("--threads", "1"), ("--head-bits", "4")])
def test_what_mlx_cannot_choose_is_refused_there(
    seen: Seen, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "hi", "--backend", "mlx", flag, value]) != 0
    assert f"Leave {flag} out" in capsys.readouterr().err
    assert not seen.load


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": float("nan")},
        {"draft_temperature": -0.1},
        {"draft_temperature": float("nan")},
        {"acceptance": "guess"},
        {"top_k": -1},
        {"min_p": 1.5},
        {"seed": -1},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        SamplingParams(**fields)


def test_the_scripted_backend_refuses_what_it_cannot_do() -> None:
    backend = ScriptedBackend(replies_target(("x",)), cycling((1,)))
    for settings in (SamplingParams(temperature=1.0), SamplingParams(presence_penalty=1.0)):
        with pytest.raises(OptionError):
            backend.configure(settings)
