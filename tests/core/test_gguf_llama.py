from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_local.errors import WeightsError
from dflash_local.gguf_llama import convert, tensor_name, unpermute

MakeGguf = Callable[[Path], dict[str, NDArray[np.float32]]]


@pytest.fixture
def converted(tmp_path: Path, make_gguf: MakeGguf) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    exact = make_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    heard: list[tuple[int, int]] = []
    convert(tmp_path / "tiny.gguf", folder, lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard)
    assert heard[0][0] == 0
    assert heard[-1][0] == heard[-1][1] == sum(v.nbytes for v in exact.values())
    return folder, exact


def test_every_weight_is_exact_and_in_the_order_of_transformers(
    converted: tuple[Path, dict[str, NDArray[np.float32]]],
) -> None:
    folder, exact = converted
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == exact.keys()
    for name, values in exact.items():
        np.testing.assert_array_equal(loaded[name], values, err_msg=name)


def test_transformers_runs_the_folder(
    converted: tuple[Path, dict[str, NDArray[np.float32]]],
) -> None:
    folder, exact = converted
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.rms_norm_eps == 1e-05
    assert model.generation_config.eos_token_id == [2, 0]
    embedding = torch.from_numpy(exact["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, embedding)
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 20, 30]])).logits
    assert torch.isfinite(logits).all()


def test_tokenizer_is_bytes_digits_and_chat_template(
    converted: tuple[Path, dict[str, NDArray[np.float32]]],
) -> None:
    folder, _ = converted
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the 123 日本 🎉\n\n x<|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert tokenizer.convert_ids_to_tokens(ids[:6]) == ["t", "he", "Ġ", "1", "2", "3"]
    assert ids[-1] == tokenizer.eos_token_id == 2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_config_comes_from_the_file(
    converted: tuple[Path, dict[str, NDArray[np.float32]]],
) -> None:
    config = json.loads((converted[0] / "config.json").read_text(encoding="utf-8"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert config["tie_word_embeddings"] is True


def test_unpermute_moves_whole_rows() -> None:
    rows = np.arange(8, dtype=np.uint8)[:, None].repeat(3, axis=1)
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf file at all, but long enough to be read")
    with pytest.raises(WeightsError, match=r"bad\.gguf is no readable GGUF"):
        convert(tmp_path / "bad.gguf", tmp_path, lambda done, total: None)
    with pytest.raises(WeightsError, match=r"blk\.0\.ssm_in"):
        tensor_name("blk.0.ssm_in.weight")
