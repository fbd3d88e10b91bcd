"""Every family: speculative ids = plain ids = the ids of transformers' own ``generate``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends.torch_backend import TorchBackend, TorchProposal  # noqa: E402
from dflash_local.backends.torch_linear import has_half_products  # noqa: E402
from dflash_local.backends.torch_load import open_pair  # noqa: E402
from dflash_local.backends.torch_probs import Drafted  # noqa: E402
from tests.support.kits import Options  # noqa: E402
from tests.support.random_target import generated, save_target  # noqa: E402
from tests.support.trees import around, proposal  # noqa: E402

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_next": ("qwen3_next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 16,
            "layer_types": WINDOWS,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "sliding_window": 16,
            "layer_types": WINDOWS,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 128,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4 with shared K/V": (
        "gemma4_text",
        {
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 128,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": 16,
            "layer_types": WINDOWS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "seed": 2,
        },
    ),
}
RIGHT = (3, 0, 1, 7, 2, 0, 5)
"""How many drafted ids of each round are the target's own; the rest are wrong."""


def plain(backend: TorchBackend, count: int) -> list[int]:
    """Ids after what was fed, one by one."""
    ids = [backend.sample()]
    while len(ids) < count:
        ids.append(backend.verify(backend.propose(ids[-1], 0)).next)
        backend.commit(1)
    return ids


def drafted(backend: TorchBackend, truth: Sequence[int], count: int) -> list[int]:
    """The same with blocks of 8 whose drafts are right in part, as ``RIGHT`` plans it."""
    ids, plan = [backend.sample()], cycle(RIGHT)
    while len(ids) < count:
        right = min(next(plan), len(truth) - len(ids) - 1)
        good = list(truth[len(ids) : len(ids) + right])
        wrong = [(truth[len(ids) + right] + 1) % 128] + [3] * (6 - right) if right < 7 else []
        block = torch.tensor([ids[-1], *good, *wrong])
        verdict = backend.verify(TorchProposal(block, Drafted(block[1:]), None))
        assert verdict.accepted == right
        backend.commit(right + 1)
        ids.extend(verdict.tokens)
    return ids[:count]


def branched(backend: TorchBackend, truth: Sequence[int], count: int) -> list[int]:
    """The same with trees that are right in part, on any of their rows."""
    ids, dice = [backend.sample()], random.Random(1)
    while len(ids) < count:
        verdict = backend.verify(proposal("torch", *around(truth[len(ids) - 1 :][:6], dice)))
        backend.commit(verdict.accepted + 1)
        ids.extend(verdict.tokens)
    return ids[:count]


@pytest.mark.parametrize("family", FAMILIES)
def test_columns_that_make_the_number_round_change_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bf16 has them on the CPU; here in fp32, where ids can be compared."""
    monkeypatch.setattr("dflash_local.backends.torch_lane_rows.column_step", lambda *asked: 64)
    kind, settings = FAMILIES[family]
    model = save_target(tmp_path, kind, **settings)
    backend = open_pair(tmp_path, None, Options(context=200, dtype="fp32"), lambda step: None)
    truth = generated(model, [7, 8], 75)
    assert plain(_fed(backend, [7, 8]), 70) == truth[:70]
    assert drafted(_fed(backend, [7, 8]), truth, 70) == truth[:70]
    if backend.info.branching:
        assert branched(_fed(backend, [7, 8]), truth, 70) == truth[:70]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_what_transformers_does(
    family: str, dtype: str, tmp_path: Path
) -> None:
    if dtype == "fp16" and not has_half_products():
        pytest.skip("this CPU computes fp16 in fp16")
    kind, settings = FAMILIES[family]
    model = save_target(tmp_path, kind, **settings)
    options = Options(context=512, dtype=dtype)
    backend = open_pair(tmp_path, None, options, lambda step: None)
    assert ("weights in fp16, computed in fp32" in backend.info.kernels) == (dtype == "fp16")
    for prompt, count in (([5, 9, 2], 110), ([7], 40), ([7, 8], 40)):
        stock = generated(model, prompt, count + 8)
        assert len(set(stock)) > 5, "an answer that is a loop proves little"
        for answer in (
            plain(_fed(backend, prompt), count),
            drafted(_fed(backend, prompt), stock, count),
        ):
            assert answer == stock[:count]
        if backend.info.branching and dtype == "fp32":
            assert branched(_fed(backend, prompt), stock, count) == stock[:count]
    assert backend.info.branching == ("linear_attention" not in settings.get("layer_types", ()))

    # A second turn goes back a little and on with another text.
    turn = [5, 9, 2, *generated(model, [5, 9, 2], 90)]
    backend.rewind(0)
    backend.extend(turn[:3])
    drafted(backend, turn[3:], 60)
    whole = [*turn[:40], 11, 12, 13]
    stock = generated(model, whole, 58)
    for back in (40, 30):
        reached = backend.rewind(back)
        assert reached <= back
        backend.extend(whole[reached:])
        assert drafted(backend, stock, 50) == stock[:50]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_lean_families_do_so_at_fixed_addresses(family: str, tmp_path: Path) -> None:
    kind, settings = FAMILIES[family]
    model = save_target(tmp_path, kind, **settings)
    backend = open_pair(tmp_path, None, Options(context=512), lambda step: None, graphs=True)
    prompt = [5, 9, 2]
    stock = generated(model, prompt, 68)
    assert plain(_fed(backend, prompt), 60) == stock[:60]
    assert drafted(_fed(backend, prompt), stock, 60) == stock[:60]


def _fed(backend: TorchBackend, prompt: list[int]) -> TorchBackend:
    backend.rewind(0)
    backend.extend(prompt)
    return backend


def test_a_hybrid_goes_back_to_the_start_of_its_last_prefill(tmp_path: Path) -> None:
    save_target(tmp_path, "qwen3_5_text", **DELTA)
    backend = open_pair(tmp_path, None, Options(context=512), lambda step: None)
    backend.extend(range(1, 21))
    backend.extend(range(21, 31))
    truth = plain(backend, 10)
    assert backend.rewind(39) == 39
    assert backend.rewind(35) == 20
    backend.extend(range(21, 31))
    assert plain(backend, 10) == truth
    assert backend.rewind(19) == 0


def test_windows_stay_exact_when_their_buffers_are_full(tmp_path: Path) -> None:
    model = save_target(tmp_path, "mistral", sliding_window=16, max_position_embeddings=4096)
    backend = open_pair(tmp_path, None, Options(context=3000), lambda step: None)
    ids = torch.randint(0, 128, (2000,), generator=torch.Generator().manual_seed(3)).tolist()
    backend.extend(ids)
    stock = generated(model, ids, 60)
    assert drafted(backend, stock, 50) == stock[:50]
    assert backend.rewind(1950) == 1950
    backend.extend(ids[1950:])
    assert plain(backend, 50) == stock[:50]
    assert backend.rewind(200) == 0
    full = 3 * 2 * 2 * 3000 * 16 * 4
    assert backend.memory().cache < full / 3
