"""Every published layout of a draft opens, drafts what it must, and is refused when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_local.backend import Verdict
from dflash_local.draft_config import DraftConfig, parse_draft_config
from dflash_local.errors import DraftMismatch, WeightsError
from dflash_local.sampling import SamplingParams
from tests.support.draft_files import V2, Tensors, edit, selector_pair, speculators_pair, v2_pair
from tests.support.driving import PROMPT, done, one_round, plain, run
from tests.support.kits import DATA, Options
from tests.support.sampling_kits import SamplingKit, sampling_kits
from tests.support.tiny import loop_pair

Pair = tuple[Path, Path]
KEPT = sorted(np.random.default_rng(1).permutation(126)[:50].tolist())

every_kit = pytest.mark.parametrize("kit", sampling_kits(), ids=lambda kit: kit.name)


def verdicts(kit: SamplingKit, pair: Pair, sampling: SamplingParams | None = None) -> list[Verdict]:
    """Twelve rounds of three drafted ids."""
    backend = kit.open(*pair, Options())
    backend.configure(sampling or SamplingParams())
    backend.extend(PROMPT)
    pending, found = backend.sample(), []
    for _ in range(12):
        found.append(one_round(backend, pending, 3))
        pending = found[-1].next
    backend.close()
    return [Verdict(v.drafted, v.accepted, v.next) for v in found]


def drafted(found: list[Verdict]) -> list[tuple[int, ...]]:
    return [verdict.drafted for verdict in found]


def rewrite(draft: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = draft / "model.safetensors"
    save_file(change(load_file(path)), path)


def layouts(folder: Path) -> dict[str, Pair]:
    """One pair per layout."""
    return {
        "z lab 2": v2_pair(folder / "a"),
        "a selector alone": selector_pair(folder / "f"),
        "speculators 1": speculators_pair(folder / "b"),
        "speculators 2": speculators_pair(folder / "c", version=2),
        "speculators 1, reduced": speculators_pair(folder / "d", kept=KEPT),
        "speculators 2, reduced": speculators_pair(folder / "e", version=2, kept=KEPT),
    }


@every_kit
def test_every_layout_gives_plain_ids(kit: SamplingKit, tmp_path: Path) -> None:
    for name, pair in layouts(tmp_path).items():
        backend = kit.open(*pair, Options())
        truth = plain(backend, PROMPT, 40)
        for count in (1, 2, 3):
            end = done(run(backend, count=count))
            assert end.tokens == tuple(truth), name
            assert end.stats.drafted > 0
        backend.close()


@every_kit
def test_speculators_files_draft_like_z_labs(kit: SamplingKit, tmp_path: Path) -> None:
    assert verdicts(kit, speculators_pair(tmp_path / "a")) == verdicts(
        kit, loop_pair(tmp_path / "b")
    )
    two = verdicts(kit, v2_pair(tmp_path / "c"))
    assert verdicts(kit, speculators_pair(tmp_path / "d", version=2)) == two


@every_kit
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reduced_vocabulary_drafts_its_own_ids(
    kit: SamplingKit, version: int, temperature: float, tmp_path: Path
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=1)
    pair = speculators_pair(tmp_path, version=version, kept=KEPT)
    found = drafted(verdicts(kit, pair, sampling))
    assert {token for ids in found for token in ids} <= set(KEPT)


@every_kit
def test_a_reduced_vocabulary_of_everything_is_the_targets(
    kit: SamplingKit, tmp_path: Path
) -> None:
    whole = speculators_pair(tmp_path / "a", kept=list(range(128)))
    assert verdicts(kit, whole) == verdicts(kit, loop_pair(tmp_path / "b"))


def without_head(pair: Pair) -> Pair:
    rewrite(pair[1], lambda t: {name: a for name, a in t.items() if name != "lm_head.weight"})
    return pair


@every_kit
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reduced_vocabulary_without_a_head_reads_rows_of_the_targets(
    kit: SamplingKit, version: int, tied: bool, temperature: float, tmp_path: Path
) -> None:
    """What it drafts is what it drafts with a copy of those rows."""
    found = []
    for name in ("own", "shared"):
        pair = speculators_pair(tmp_path / name, version=version, kept=KEPT)
        edit(pair[0], {"tie_word_embeddings": tied}, {})
        target = load_file(pair[0] / "model.safetensors")
        rows = target["model.embed_tokens.weight" if tied else "lm_head.weight"][KEPT]
        rewrite(pair[1], lambda t, rows=rows: {**t, "lm_head.weight": rows})  # type: ignore[misc]
        if name == "shared":
            without_head(pair)
        found.append(verdicts(kit, pair, SamplingParams(temperature=temperature, seed=1)))
    assert found[0] == found[1]


@every_kit
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_quantised_head_serve_too(kit: SamplingKit, bits: int, tmp_path: Path) -> None:
    pair = without_head(speculators_pair(tmp_path, kept=KEPT))
    scheme = {4: "nf4", 8: "int8"}[bits] if kit.name == "torch" else f"{bits}bit"
    backend = kit.open(*pair, Options(quantize=scheme))
    truth = plain(backend, PROMPT, 40)
    assert done(run(backend, count=3)).tokens == tuple(truth)
    backend.close()
    found = drafted(verdicts(kit, pair))
    assert {token for ids in found for token in ids} <= set(KEPT)


@every_kit
def test_an_own_embedding_and_head_are_used(kit: SamplingKit, tmp_path: Path) -> None:
    target = load_file(DATA / "loop" / "target.safetensors")
    own = {
        "embed_tokens.weight": target["model.embed_tokens.weight"],
        "lm_head.weight": target["lm_head.weight"],
    }
    truth = verdicts(kit, loop_pair(tmp_path / "a"))
    pair = loop_pair(tmp_path / "b")
    rewrite(pair[1], lambda tensors: {**tensors, **own})
    assert verdicts(kit, pair) == truth
    for index, name in enumerate(own):
        pair = loop_pair(tmp_path / str(index))
        other = {**own, name: np.ascontiguousarray(own[name][::-1])}
        rewrite(pair[1], lambda tensors, other=other: {**tensors, **other})  # type: ignore[misc]
        assert drafted(verdicts(kit, pair)) != drafted(truth)


@every_kit
def test_the_selector_is_loaded_and_used(kit: SamplingKit, tmp_path: Path) -> None:
    truth = drafted(verdicts(kit, v2_pair(tmp_path / "a")))
    for index, part in enumerate(("_codebook", "hidden_projection", "kernel_projection")):
        pair = v2_pair(tmp_path / str(index))
        rewrite(
            pair[1],
            lambda tensors, part=part: {  # type: ignore[misc]
                name: np.zeros_like(tensor) if part in name else tensor
                for name, tensor in tensors.items()
            },
        )
        assert drafted(verdicts(kit, pair)) != truth, part


@every_kit
@pytest.mark.parametrize(
    "numbers",
    [
        {"input_embedding_scale": 3.0},
        {"output_multiplier": 0.02},
        {"final_logit_softcapping": 0.5},
        {"selector_top_k": 1},
    ],
    ids=str,
)
def test_every_number_of_the_config_counts(
    kit: SamplingKit, numbers: dict[str, float], tmp_path: Path
) -> None:
    truth = drafted(verdicts(kit, v2_pair(tmp_path / "a")))
    assert drafted(verdicts(kit, v2_pair(tmp_path / "b", **numbers))) != truth


@every_kit
def test_version_2_keys_suffice_without_the_architecture(kit: SamplingKit, tmp_path: Path) -> None:
    pair = v2_pair(tmp_path / "a")
    edit(pair[1], {"architectures": ["DFlashDraftModel"]}, {})
    assert verdicts(kit, pair) == verdicts(kit, v2_pair(tmp_path / "b"))


@every_kit
def test_version_2_runs_beside_a_16_bit_target(kit: SamplingKit, tmp_path: Path) -> None:
    backend = kit.open(*v2_pair(tmp_path), Options(dtype="fp16"))
    assert len(done(run(backend)).tokens) == 40


def rename(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): t for name, t in tensors.items()}


DAMAGE: dict[str, tuple[Callable[[Path], Pair], Callable[[Tensors], Tensors], str]] = {
    "codebook with a suffix": (
        v2_pair,
        rename("predecessor_codebook", "predecessor_codebook.weight"),
        "lacks candidate_selector.predecessor_codebook",
    ),
    "no convolution": (v2_pair, rename("mlp_conv", "mlp_cone"), "lacks layers.0.mlp_conv"),
    "short codebook": (
        v2_pair,
        lambda t: {n: a[:100] if "successor" in n else a for n, a in t.items()},
        "as [100, 8], its config says [128, 8]",
    ),
    "attention sinks": (
        loop_pair,
        lambda t: {**t, "layers.0.self_attn.sinks": np.zeros(4, np.float32)},
        "holds layers.0.self_attn.sinks, which its config does not call for",
    ),
    "ids beyond the target": (
        lambda folder: speculators_pair(folder, kept=KEPT),
        lambda t: {**t, "d2t": t["d2t"] + 100},
        "the target has 0 to 127",
    ),
    "two ids of the draft for one": (
        lambda folder: speculators_pair(folder, kept=KEPT),
        lambda t: {**t, "d2t": -np.arange(len(KEPT))},
        "two of its ids to the same id",
    ),
    "small own embedding": (
        loop_pair,
        lambda t: {**t, "embed_tokens.weight": np.zeros((127, 64), np.float32)},
        "beyond its own embedding of 127 rows",
    ),
    "no mapping": (
        lambda folder: speculators_pair(folder, kept=KEPT),
        lambda t: {n: a for n, a in t.items() if n != "d2t"},
        "lacks d2t",
    ),
}


@every_kit
@pytest.mark.parametrize("name", DAMAGE)
def test_files_that_do_not_fit_are_refused(kit: SamplingKit, name: str, tmp_path: Path) -> None:
    make, change, told = DAMAGE[name]
    pair = make(tmp_path)
    rewrite(pair[1], change)
    with pytest.raises(DraftMismatch) as caught:
        kit.open(*pair, Options())
    assert told in str(caught.value)


BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_target_layers": 4,
    "mask_token_id": 127,
}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "an EAGLE draft"),
        ({"speculators_model_type": "eagle3"}, "an EAGLE draft"),
        ({"architectures": ["DSparkDraftModel"]}, "a DSpark draft"),
        ({"architectures": ["DominoDraftModel"]}, "a Domino draft"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "a Laguna draft"),
        ({"architectures": ["MiMoDFlashModel"]}, "a MiMo draft"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"use_swa": True}},
            "a MiMo draft",
        ),
        ({"architectures": ["MedusaModel"]}, "a Medusa draft"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "no DFlash draft"),
        (
            {"speculators_model_type": "dflash", "sample_from_anchor": True},
            "sample from the anchor",
        ),
        (
            {"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 8}},
            "lacks conv_kernel_size",
        ),
        (
            {
                "architectures": ["DFlash2DraftModel"],
                "dflash_config": {**V2, "conv_group_size": 48},
            },
            "does not divide hidden size 64",
        ),
    ],
)
def test_other_kinds_are_refused_by_name(config: dict[str, Any], told: str) -> None:
    with pytest.raises(WeightsError) as caught:
        parse_draft_config({**BASE, **config})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


ODD: tuple[Any, ...] = ("x", "", -1, 0, 1.5, [], {}, ["x"], {"a": 1}, True, 10**400, float("nan"))
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
def test_odd_values_are_refused_or_read_but_nothing_else(odd: Any, nested: bool) -> None:
    whole: dict[str, Any] = {
        **BASE,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {**V2, "target_layer_ids": [0, 2]},
        "rope_scaling": YARN,
        "rope_theta": 1e4,
        "layer_types": ["full_attention"] * int(BASE["num_hidden_layers"]),
        "vocab_size": 128,
        "draft_vocab_size": 64,
        "block_size": 4,
        "rms_norm_eps": 1e-6,
        "sliding_window": 8,
        "final_logit_softcapping": 3.0,
        "model_type": "qwen3",
        "is_causal": False,
    }
    parse_draft_config(whole)
    part = whole["dflash_config"] if nested else whole
    for place in (part, YARN) if nested else (part,):
        for key in list(place):
            before, place[key] = place[key], odd
            try:
                read: DraftConfig | None = parse_draft_config(whole)
            except WeightsError as error:
                read, told = None, str(error)
            place[key] = before
            assert read.draft_vocab_size != 0 if read is not None else "\n" not in told
