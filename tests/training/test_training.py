"""The three stages on a tiny target: what they give, and what a kill in each of them costs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dflash_local import load
from dflash_local.cli import main
from dflash_local.errors import OptionError
from dflash_local.sampling import SamplingParams
from dflash_local.training.prompts import Asked, read_prompts, split
from dflash_local.training.workplace import workplace

SMALL = {
    "own": 20,
    "held-out": 8,
    "rows": 16,
    "answer-tokens": 32,
    "layers": 2,
    "taps": 2,
    "block": 4,
    "short-block": 2,
    "sequences": 8,
    "anchors": 8,
    "rate": 5e-3,
    "threads": 1,
    "eval-tokens": 32,
}


def command(target: Path, out: Path, prompts: Path, *more: str) -> list[str]:
    small = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    return ["train", str(target), "--out", str(out), "--prompts", str(prompts), *small, *more]


def evaluations(out: Path) -> list[dict[str, float]]:
    lines = (out / "fit" / "held_out.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


MANNERS: list[tuple[str, ...]] = [
    (),
    ("--v2", "--draft-vocab", "80"),
    ("--features", "recompute", "--init", "random", "--selector", "--draft-vocab", "60"),
]


@pytest.mark.parametrize("more", MANNERS)
def test_tau_rises_and_the_draft_serves(
    target: Path, prompts: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    assert main(command(target, out, prompts, "--steps", "120", *more)) == 0
    found = evaluations(out)
    assert found[-1]["tau"] > 1.5
    assert found[-1]["tau"] > found[0]["tau"]
    assert f"tau {found[-1]['tau']:.2f}" in (out / "draft" / "README.md").read_text()
    with load(target, draft=out / "draft", backend="torch", dtype="fp32") as engine:
        settings = SamplingParams(max_tokens=40)
        plain = engine.complete("Hello there", settings, block=0, reuse=False)
        drafted = engine.complete("Hello there", settings, block=4, reuse=False)
    assert drafted.tokens == plain.tokens
    tensors = load_file(out / "draft" / "model.safetensors")
    assert "lm_head.weight" not in tensors, "the head is the target's"
    said = int(more[-1]) if "--draft-vocab" in more else None
    assert (len(tensors["d2t"]) if "d2t" in tensors else None) == said


def kill_when(argv: list[str], ready: Callable[[], bool]) -> None:
    """Start the command in a process of its own and kill it outright once ``ready``."""
    child = subprocess.Popen(
        [sys.executable, "-m", "dflash_local", *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not ready():
        assert child.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_run_that_is_killed_in_every_stage_ends_as_an_unbroken_one(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    steps = ("--steps", "60", "--save-seconds", "0.01")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(command(target, whole, prompts, *steps)) == 0
    argv = command(target, broken, prompts, *steps)
    for sign in (
        "prompts/part-00000.jsonl",
        "data/part-00000.safetensors",
        "fit/checkpoint.safetensors",
    ):
        kill_when(argv, (broken / sign).is_file)
        assert not (broken / "draft" / "README.md").exists()
    assert main(argv) == 0
    for name in (
        "draft/model.safetensors",
        "prompts/held_out.jsonl",
        "data/part-00001.safetensors",
    ):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name
    assert evaluations(broken)[-1] == evaluations(whole)[-1]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert main(argv) != 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dflash")]
    assert len(lines) == 1
    return lines[0]


def test_bad_input_is_told_in_one_line(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    lines = prompts.read_text().splitlines()
    lines[4], lines[7] = '{"txt": 1}', "{"
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(lines))
    assert "lines 5, 8 of 60 are no prompt" in refused(command(target, out, broken), capsys)
    assert "--stage prompts" in refused(command(target, out, prompts, "--stage", "data"), capsys)
    assert main(command(target, out, prompts, "--stage", "prompts")) == 0
    assert "own 20, now it is 21" in refused(command(target, out, prompts, "--own", "21"), capsys)
    with monkeypatch.context() as patch:
        usage = type("Usage", (), {"free": 2**28})
        patch.setattr("shutil.disk_usage", lambda folder: usage)
        told = refused(command(target, out, prompts), capsys)
    assert "--features recompute" in told
    assert not list((out / "data").glob("part-*"))
    settings = target / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    assert "no chat template" in refused(command(target, tmp_path / "other", prompts), capsys)


def stages(argv: list[str], *names: str) -> None:
    """Run these stages, each on its own."""
    for name in names:
        assert main([*argv, "--stage", name]) == 0


def test_a_loss_that_is_no_number_keeps_the_last_checkpoint(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = command(target, out, prompts, "--steps", "40", "--save-seconds", "0.001")
    stages(argv, "prompts", "data")
    part = out / "data" / "part-00003.safetensors"
    tensors = load_file(part)
    tensors["features"][:] = math.nan  # a target that overflows gives such states
    save_file(tensors, part)
    told = refused(argv, capsys)
    assert "The loss is nan at step" in told
    assert (out / "fit" / "checkpoint.safetensors").is_file() == ("of step 0 is" not in told)


def test_a_target_that_computes_no_numbers_is_told(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(target / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(weights, target / "model.safetensors")
    argv = command(target, tmp_path / "out", prompts, "--own", "0")
    assert "what is no number" in refused(argv, capsys)
    assert not list((tmp_path / "out" / "data").glob("part-*"))


def test_a_folder_keeps_to_one_training(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    assert "something else" in refused(command(target, foreign, prompts), capsys)
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
    out = tmp_path / "out"
    argv = command(target, out, prompts)
    stages(argv, "prompts", "data")
    with workplace(out, target):
        assert "Another training runs" in refused(argv, capsys)
    fit = [*argv, "--stage", "fit", "--steps", "2"]
    assert "taps 2, now it is 3" in refused([*fit, "--taps", "3"], capsys)
    assert "thinking None, now it is True" in refused([*fit, "--thinking"], capsys)
    assert "no folder" in refused([*fit, "--init", str(tmp_path / "nowhere")], capsys)
    begun = out / "data" / "recipe.json"
    facts = begun.read_text()
    begun.write_text(json.dumps({k: v for k, v in json.loads(facts).items() if k != "order"}))
    assert "order None" in refused([*argv, "--stage", "data"], capsys), "parts were dealt otherwise"
    begun.write_text(facts)
    asked = out / "prompts" / "train.jsonl"
    all_of_them = asked.read_text()
    asked.write_text("")
    assert "holds no prompts" in refused([*argv, "--stage", "data"], capsys)
    assert begun.read_text() == facts, "a refusal must bind nothing"
    asked.write_text(all_of_them)
    (out / "data" / "part-00001.safetensors").write_bytes(b"")
    assert "the first is number 1" in refused(fit, capsys)
    stages(argv, "data")
    assert main(fit) == 0, "a refusal must bind nothing"
    weights = load_file(target / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, target / "model.safetensors")
    assert "another target" in refused(fit, capsys)


@pytest.fixture
def earlier(target: Path, prompts: Path, tmp_path: Path) -> Path:
    """The folder of a training that is through."""
    assert main(command(target, tmp_path / "first", prompts, "--steps", "60")) == 0
    return tmp_path / "first"


def test_another_training_is_learnt_from_too(
    target: Path, earlier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, new = tmp_path / "second", tmp_path / "new.jsonl"
    known = read_prompts(earlier / "prompts" / "train.jsonl")
    texts = {f"What is {i} times {i}?" for i in range(20)}
    lines = [*(asked.text for asked in known[:30]), *texts]
    new.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    more = ("--with", str(earlier), "--init", str(earlier / "draft"), "--steps", "8")
    argv = command(target, out, new, "--held-out", "12", *more)
    # The seed is that of the training before: what its target wrote must not come again.
    assert main(argv) == 0
    held_out = {asked.text for asked in read_prompts(out / "prompts" / "held_out.jsonl")}
    train = {asked.text for asked in read_prompts(out / "prompts" / "train.jsonl")}
    assert held_out.isdisjoint(asked.text for asked in known)
    apart = read_prompts(earlier / "prompts" / "held_out.jsonl")
    assert train.isdisjoint(asked.text for asked in apart)
    assert len(train & {asked.text for asked in known}) == 30, "what a file asks for stays"
    card = (out / "draft" / "README.md").read_text()
    assert f"{len(known) + len(train)} sequences with" in card
    assert "in 2 trainings" in card
    assert "Start: an earlier draft" in card
    # Eight steps from nothing would say nothing yet.
    assert evaluations(out)[-1]["tau"] > 1.3, "it goes on where that draft stood"
    without = [a for a in argv if a not in ("--with", str(earlier))]
    assert "other trainings behind --with" in refused([*without, "--stage", "fit"], capsys)


def test_prompts_that_were_learnt_from_measure_nothing(
    target: Path, earlier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, new = tmp_path / "second", tmp_path / "new.jsonl"
    known = [asked.text for asked in read_prompts(earlier / "prompts" / "train.jsonl")]
    fresh = {f"What is {i} times {i}?" for i in range(20)}
    for texts, kept in ((known[:20], 0), ([*known[:20], *fresh], 1)):
        new.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        out = tmp_path / f"second-{kept}"
        argv = command(target, out, new, "--own", "0", "--held-out", "12", "--steps", "4")
        stages(argv, "prompts")
        joint = [*argv, "--with", str(earlier)]
        if not kept:
            assert "learnt from every prompt" in refused(joint, capsys)
            assert not list(out.glob("data/part-*"))
            continue
        assert main(joint) == 0
        held_out = {asked.text for asked in read_prompts(out / "prompts" / "held_out.jsonl")}
        assert 0 < len(held_out & fresh) < 12, "the case needs both kinds"
        assert evaluations(out)[-1]["prompts"] == len(held_out & fresh)
    refusal = command(target, tmp_path / "third", new, "--own", "0", "--held-out", "21")
    assert "20 of 40 prompts are new" in refused([*refusal, "--with", str(earlier)], capsys)


def test_a_training_that_does_not_fit_is_refused_at_once(
    target: Path, prompts: Path, earlier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "second"
    argv = command(target, out, prompts, "--with", str(earlier))
    assert "holds no answers" in refused([*argv, "--with", str(tmp_path)], capsys)
    assert "is given twice" in refused([*argv, "--with", f"{earlier}/."], capsys)
    assert "is the --out itself" in refused([*argv, "--with", str(out)], capsys)
    assert "tap_layers [0, 1], not [0, 1, 2]" in refused([*argv, "--taps", "3"], capsys)
    assert "features 'store'" in refused([*argv, "--features", "recompute"], capsys)
    part = earlier / "data" / "part-00001.safetensors"
    whole = part.read_bytes()
    part.write_bytes(b"")
    assert "is damaged" in refused(argv, capsys)
    part.unlink()
    assert "of the 5 parts" in refused(argv, capsys)
    part.write_bytes(whole)
    weights = load_file(target / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, target / "model.safetensors")
    assert "another target" in refused(argv, capsys)
    assert not out.exists(), "a refusal must leave nothing"


LATE = {
    "a block of one": (("--block", "1"), "--block is 1"),
    "a short block that is longer": (("--short-block", "5"), "Blocks of 5 and 4 rows"),
    "too many ids": (("--draft-vocab", "5000"), "the target has 128"),
    "nothing to go on from": (("--init", "/nowhere"), "no folder"),
    "answers beyond the context": (("--answer-tokens", "90000"), "has no room for prompts"),
}


@pytest.mark.parametrize("case", LATE)
def test_what_cannot_be_fitted_is_refused_at_once(
    case: str, target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, told = LATE[case]
    out = tmp_path / "out"
    assert told in refused(command(target, out, prompts, *options), capsys)
    assert not list(out.glob("*/part-*"))


def test_files_of_others_in_the_folder_stay(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = command(target, out, prompts)
    stages(argv, "prompts")
    mine = [out / "prompts" / name for name in (".gitignore", ".lock")]
    stale = out / "prompts" / ".part-00000.jsonl.0123abcd"
    for path in (*mine, stale):
        path.write_text("x")
    stages(argv, "prompts")
    assert all(path.is_file() for path in mine)
    assert not stale.exists()


ODD = {
    "separators inside": ('{"text": "a\u2028b and a longer text\u0085c"}\n', None),
    "a mark of byte order": ('\ufeff{"text": "What is a comet?"}\n', None),
    "line ends of Windows": ('{"text": "What is a comet?"}\r\n', None),
    "half a letter": ('{"text": "x \\ud800 y", "kind": "\\ud800"}\n', None),
    "deep brackets": ("[" * 100_000 + "\n", "line 1 of 1 is no prompt"),
    "nothing to say": ('{"text": "  "}\n', "line 1 of 1 is no prompt"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_prompt_files(case: str, tmp_path: Path) -> None:
    text, problem = ODD[case]
    path = tmp_path / "odd.jsonl"
    path.write_bytes(text.encode())
    if problem is not None:
        with pytest.raises(OptionError, match=problem):
            read_prompts(path)
        return
    other = Asked("given", "another one")
    found = {*read_prompts(path), other}
    split(tmp_path, sorted(found, key=repr), 1)
    again = [*read_prompts(tmp_path / "train.jsonl"), *read_prompts(tmp_path / "held_out.jsonl")]
    assert set(again) == found


@pytest.mark.parametrize("name", ["prompts/whole.json", "training.json", "data/recipe.json"])
def test_a_damaged_note_is_told(
    name: str, target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = command(target, out, prompts)
    stages(argv, "prompts", "data")
    (out / name).write_text("[")
    assert "is damaged" in refused(argv, capsys)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for a child")
def test_ctrl_c_in_the_fit_keeps_the_last_step(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = command(target, out, prompts, "--steps", "4000", "--save-seconds", "900")
    stages(argv, "prompts", "data")
    child = subprocess.Popen(
        [sys.executable, "-m", "dflash_local", *argv], stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("Fitting: 1 of"):
            break
    child.send_signal(signal.SIGINT)
    told = child.stderr.read()
    assert child.wait() == 130
    assert "the same command goes on" in told
    assert (out / "fit" / "checkpoint.safetensors").is_file()
