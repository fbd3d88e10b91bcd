"""Bad models and bad options: one clear line, a non-zero exit, no traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends.torch_weights import TensorReader  # noqa: E402
from dflash_local.cli import main  # noqa: E402
from dflash_local.errors import WeightsError  # noqa: E402
from tests.support.chat_pair import chat_pair  # noqa: E402
from tests.support.tiny import loop_pair  # noqa: E402

Change = Callable[[Path, Path], None]


def edit(name: str, **changes: Any) -> Change:
    """Change keys of ``target`` or ``draft``'s config.json; None removes a key."""

    def change(target: Path, draft: Path) -> None:
        path = (target if name == "target" else draft) / "config.json"
        config = json.loads(path.read_text())
        for key, value in changes.items():
            where = config
            if key in ("mask_token_id", "target_layer_ids"):
                where = config["dflash_config"]
            if value is None:
                del where[key]
            else:
                where[key] = value
        path.write_text(json.dumps(config))

    return change


def remove(name: str, file: str) -> Change:
    def change(target: Path, draft: Path) -> None:
        ((target if name == "target" else draft) / file).unlink()

    return change


def truncate(name: str, keep: int) -> Change:
    def change(target: Path, draft: Path) -> None:
        path = (target if name == "target" else draft) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])

    return change


def write(name: str, file: str, text: str) -> Change:
    def change(target: Path, draft: Path) -> None:
        ((target if name == "target" else draft) / file).write_text(text)

    return change


def pickled(target: Path, draft: Path) -> None:
    (target / "model.safetensors").rename(target / "pytorch_model.bin")


def selector(**numbers: int) -> Change:
    """A draft of version 2 with such numbers."""
    fitting = {"conv_kernel_size": 0, "conv_group_size": 1, "selector_rank": 4, "selector_top_k": 4}
    return edit("draft", **{**fitting, **numbers})


CASES: dict[str, tuple[Change, str]] = {
    "no weights": (remove("target", "model.safetensors"), "holds no weights"),
    "pickled weights": (pickled, "only pytorch_model.bin"),
    "truncated target": (truncate("target", 300_000), "its header says"),
    "truncated header": (truncate("target", 100), "truncated"),
    "empty weights": (truncate("draft", 0), "truncated"),
    "truncated draft": (truncate("draft", 200_000), "its header says"),
    "no draft weights": (remove("draft", "model.safetensors"), "holds no weights"),
    "no tokenizer": (remove("target", "tokenizer.json"), "tokenizer"),
    "broken tokenizer": (write("target", "tokenizer.json", "{"), "tokenizer"),
    "broken config": (write("target", "config.json", "{"), "config.json cannot be read"),
    "list as config": (write("draft", "config.json", "[]"), "holds no JSON object"),
    "own code": (edit("target", auto_map={"AutoModel": "m.M"}), "code of its own"),
    "unknown family": (edit("target", model_type="rwkv"), "does not run 'rwkv'"),
    "hidden size": (edit("draft", target_hidden_size=96), "states of size 96"),
    "tap out of range": (edit("draft", target_layer_ids=[0, 1, 4]), "taps target layer 4"),
    "mask id": (edit("draft", mask_token_id=128), "mask id 128 lies beyond"),
    "no mask id": (edit("draft", mask_token_id=None), "lacks mask_token_id"),
    "no block size is a default, no hidden size is an error": (
        edit("draft", hidden_size=None),
        "lacks hidden_size",
    ),
    "layer types": (edit("draft", layer_types=["full_attention"]), "1 layer types for 2"),
    "strange layer": (edit("draft", layer_types=["full_attention", "mamba"]), "'mamba'"),
    "wrong kind": (edit("draft", architectures=["Eagle3Draft"]), "an EAGLE draft"),
    "more layers than weights": (
        edit("draft", num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "lacks layers.2",
    ),
    "other shape": (edit("draft", intermediate_size=80), "its config says"),
    "no attention heads": (edit("draft", num_attention_heads=0), "heads is 0"),
    "deep nesting": (write("target", "config.json", "[" * 100_000), "cannot be read"),
    "end as text": (
        write("target", "generation_config.json", '{"eos_token_id": "x"}'),
        "eos_token_id is 'x'",
    ),
    "end beyond the vocabulary": (
        write("target", "generation_config.json", '{"eos_token_id": [1, 99999]}'),
        "the target's ids are 0 to",
    ),
    "draft of a smaller vocabulary": (edit("draft", vocab_size=100), "The draft knows 100 ids"),
    "unknown rotary embedding": (
        edit("target", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}),
        "rotary embedding 'spiral' is not supported",
    ),
    "yarn without a factor": (edit("draft", rope_scaling={"rope_type": "yarn"}), "factor"),
    **{
        f"yarn's {name} is {value}": (
            edit("draft", rope_scaling={"rope_type": "yarn", "factor": 2.0, name: value}),
            f"{name} is",
        )
        for name, value in (
            ("factor", 0),
            ("factor", float("inf")),
            ("original_max_position_embeddings", -5),
            ("beta_fast", -1),
            ("beta_slow", -3),
        )
    },
    "endless angles": (edit("draft", rope_theta=float("inf")), "rope_theta is inf"),
    "layers without end": (
        edit("draft", num_hidden_layers=2 * 10**9, layer_types=None),
        "has 2e+09 layers",
    ),
    **{
        f"selector's {name} is {value}": (selector(**{name: value}), f"{name} is {value}, it can")
        for name, value in (
            ("selector_top_k", 0),
            ("selector_top_k", -1),
            ("selector_top_k", 100_000),
            ("selector_rank", 0),
            ("conv_kernel_size", -1),
            ("conv_group_size", -16),
            ("conv_group_size", 0),
        )
    },
    "layers of another family": (
        edit("target", layer_types=["linear_attention"] * 4),
        "have no layers of 'linear_attention'",
    ),
    **{
        f"target's {name} is {value}": (
            edit("target", layer_types=None, **{name: value}),
            f"{name} is {value}",
        )
        for name, value in (
            ("num_hidden_layers", 0),
            ("num_key_value_heads", -2),
            ("head_dim", -16),
        )
    },
    "missing target tensor": (edit("target", num_hidden_layers=5, layer_types=None), "lacks"),
}


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail; return its one line."""
    status = main(argv)
    captured = capsys.readouterr()
    assert status != 0
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in lines[0]
    return lines[0]


@pytest.mark.parametrize("case", CASES)
def test_a_bad_model_is_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, told = CASES[case]
    target, draft = chat_pair(tmp_path)
    change(target, draft)
    argv = ("generate", "hi", "--target", str(target), "--draft", str(draft))
    assert told in fails(capsys, *argv)


def test_a_field_of_another_family_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only Gemma's last layers share K/V."""
    target, draft = chat_pair(tmp_path)
    argv = ["generate", "hi", "--target", str(target), "--draft", str(draft), "--max-tokens", "9"]
    assert main(argv) == 0
    answer = capsys.readouterr().out
    edit("target", num_kv_shared_layers=2)(target, draft)
    assert main(argv) == 0
    assert capsys.readouterr().out == answer


def test_the_same_pair_unharmed_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = chat_pair(tmp_path)
    argv = ["generate", "hi", "--target", str(target), "--draft", str(draft), "--max-tokens", "9"]
    assert main([*argv, "--dtype", "fp32", "--json", "--block", "3"]) == 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["stats"]["drafted"] > 0
    assert main([*argv, "--dtype", "fp32", "--json", "--plain"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["tokens"], plain["stats"]["drafted"]) == (reply["tokens"], 0)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("generate", "hi", "--model", "demmo"), "Did you mean demo"),
        (("generate", "hi", "--model", "/no/such/folder"), "no folder"),
        (("generate", "hi", "--model", "x" * 300), "There is no model called xxx"),
        (("generate", "hi", "--model", "~nobody-of-this-name/x"), "no folder"),
        (("generate", "hi", "--draft", "y" * 5000), "no folder yyy"),
        (("generate", " "), "prompt is empty"),
        (("generate", "hi", "--temperature", "-1"), "temperature is -1"),
        (("generate", "hi", "--top-p", "2"), "top_p is 2"),
        (("generate", "hi", "--max-tokens", "0"), "max_tokens is 0"),
        (("generate", "hi", "--context", "0"), "context is 0"),
        (("generate", "hi", "--plain", "--block", "3"), "exclude each other"),
        (("bench", "--prompts", "0"), "--prompts is 0"),
    ],
)
def test_a_bad_option_is_one_line(
    argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in fails(capsys, *argv)


@pytest.mark.parametrize(("asked", "most"), [(["9"], 8), (["5", "--no-tree"], 4)])
def test_a_block_larger_than_can_be_is_refused(
    asked: list[str], most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree has twice the rows of the trained block at most, a path those of it."""
    target, draft = chat_pair(tmp_path)
    argv = ("generate", "hi", "--target", str(target), "--draft", str(draft), "--block", *asked)
    assert f"takes {most} at most" in fails(capsys, *argv)


def test_a_context_beyond_the_models_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = chat_pair(tmp_path)
    argv = ("generate", "hi", "--target", str(target), "--draft", str(draft), "--context", "9999")
    assert "holds 1 to 2048" in fails(capsys, *argv)


def test_a_folder_without_a_draft_decodes_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = chat_pair(tmp_path)
    shutil.rmtree(draft)
    argv = ["generate", "hi", "--target", str(target), "--max-tokens", "5", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["drafted"] == 0


@pytest.mark.parametrize("damage", ["deleted", "cut"])
def test_a_file_that_changes_while_it_is_read_is_one_error(damage: str, tmp_path: Path) -> None:
    target, _ = loop_pair(tmp_path)
    reader = TensorReader(target, torch.float32, torch.device("cpu"))
    name, other = list(reader)[:2]
    kept = reader.read(name)
    before = kept.clone()
    file = target / "model.safetensors"
    if damage == "deleted":
        file.unlink()
    else:
        os.truncate(file, 100)
    with pytest.raises(WeightsError, match=r"model.safetensors cannot be read"):
        reader.read(other)
    assert torch.equal(kept, before), "what was read is no view of the file"
