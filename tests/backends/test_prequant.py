"""Folders that bitsandbytes quantised before, and embeddings in 8 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
bnb = pytest.importorskip("bitsandbytes")

from safetensors.torch import load_file, save_file  # noqa: E402

from dflash_local.backends.torch_config import target_config, target_shape  # noqa: E402
from dflash_local.backends.torch_embedding import Int8Embedding, embedding_bits  # noqa: E402
from dflash_local.backends.torch_load import open_pair  # noqa: E402
from dflash_local.backends.torch_open_target import open_target  # noqa: E402
from dflash_local.backends.torch_quant import Quantiser  # noqa: E402
from dflash_local.errors import BackendUnavailable, DflashError, OptionError  # noqa: E402
from tests.support.driving import plain  # noqa: E402
from tests.support.kits import Options  # noqa: E402
from tests.support.random_target import save_target  # noqa: E402

CPU = torch.device("cpu")


def store_packed(folder: Path, model: Any, *, nested: bool) -> None:
    """Quantise a saved model's layers as bitsandbytes stores them, and the model likewise."""
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or name == "lm_head":
            continue
        packed = bnb.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compress_statistics=nested,
            quant_type="nf4",
        )
        packed.weight = bnb.nn.Params4bit(
            module.weight.data.clone(),
            requires_grad=False,
            compress_statistics=nested,
            quant_type="nf4",
            module=packed,
        ).to("cpu")
        state = packed.weight.quant_state
        for part, value in packed.state_dict().items():
            if part != "bias":
                tensors[f"{name}.{part}"] = value.contiguous()
        module.weight.data = bnb.functional.dequantize_4bit(packed.weight.data, state).float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen2", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": None}),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_packed_folders_give_the_logits_of_their_weights(
    family: str, settings: dict[str, Any], nested: bool, tmp_path: Path
) -> None:
    model = save_target(tmp_path, family, intermediate_size=128, **settings)
    store_packed(tmp_path, model, nested=nested)
    config = target_config(tmp_path)
    quantiser = Quantiser()
    target = open_target(
        tmp_path,
        config,
        target_shape(config),
        (),
        64,
        torch.float32,
        CPU,
        packed=quantiser.packed,
    )
    ids = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        stock = model(ids[None]).logits[0]
        ours = target.logits(target.forward(ids))
    # On a CPU with the fused kernel products are in bf16.
    off = ((ours - stock).norm() / stock.norm()).item()
    assert off < 0.03
    assert quantiser.quantised_weights == 3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    assert not quantiser.refused


def test_a_packed_folder_is_loaded_and_named(tmp_path: Path) -> None:
    store_packed(tmp_path, save_target(tmp_path, "qwen3", intermediate_size=128), nested=True)
    options = Options(dtype="bf16", head_bits=16)
    backend = open_pair(tmp_path, None, options, lambda step: None)
    assert backend.info.quantization == "nf4"
    assert len(plain(backend, (5, 9, 2), 20)) == 20
    with pytest.raises(OptionError, match="stored in nf4 already"):
        open_pair(tmp_path, None, Options(quantize="int8"), lambda step: None)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes fp4"),
        ("nf4", "quantization_config is 'nf4'"),
    ],
)
def test_other_quantisations_are_refused_by_name(stored: Any, said: str, tmp_path: Path) -> None:
    save_target(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    with pytest.raises(DflashError, match=said):
        open_pair(tmp_path, None, Options(), lambda step: None)


def test_a_damaged_scale_is_an_error_of_the_files(tmp_path: Path) -> None:
    store_packed(tmp_path, save_target(tmp_path, "qwen3", intermediate_size=128), nested=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight.absmax"
    for damage in (tensors[name][:-1].clone(), None):
        broken = {k: v for k, v in tensors.items() if k != name}
        if damage is not None:
            broken[name] = damage
        save_file(broken, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(DflashError, match=r"down_proj.weight"):
            open_pair(tmp_path, None, Options(), lambda step: None)


def test_packed_weights_of_other_families_are_refused(tmp_path: Path) -> None:
    save_target(tmp_path, "gemma3_text")
    config = json.loads((tmp_path / "config.json").read_text())
    stored = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    with pytest.raises(BackendUnavailable, match="gemma3_text"):
        open_pair(tmp_path, None, Options(), lambda step: None)


def test_embedding_rows_in_8_bits_are_near_and_small() -> None:
    weight = torch.randn(9000, 64, generator=torch.Generator().manual_seed(0))
    rows = Int8Embedding(weight)
    ids = torch.tensor([0, 4095, 4096, 8999, 5])
    step = weight.abs().amax(dim=-1, keepdim=True) / 127
    assert ((rows(ids) - weight[ids]).abs() <= 0.51 * step[ids]).all()
    assert rows.bytes == 9000 * (64 + 4)


def test_only_a_quantised_target_on_a_card_gets_a_small_embedding() -> None:
    card = torch.device("cuda")
    assert embedding_bits(None, card, quantised=True) == 8
    assert embedding_bits(None, card, quantised=False) == 16
    assert embedding_bits(None, CPU, quantised=True) == 16
    assert embedding_bits(16, card, quantised=True) == 16


def test_embedding_bits_are_an_option(tmp_path: Path) -> None:
    for tied in (False, True):
        folder = tmp_path / str(tied)
        save_target(folder, "llama", vocab_size=512, tie_word_embeddings=tied)
        sizes = {}
        for bits in (None, 8, 16):
            options = Options(dtype="fp32", embed_bits=bits)
            backend = open_pair(folder, None, options, lambda step: None)
            sizes[bits] = backend.memory().weights
            assert len(plain(backend, (5, 9, 2), 10)) == 10
        assert sizes[None] == sizes[16]
        saved = 0 if tied else 512 * 64 * 4 - 512 * (64 + 4)
        assert sizes[16] - sizes[8] == saved
    save_target(tmp_path / "gemma", "gemma3_text")
    with pytest.raises(OptionError, match="embedding of gemma3_text"):
        open_pair(tmp_path / "gemma", None, Options(embed_bits=8), lambda step: None)
