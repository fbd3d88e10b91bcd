"""DFlash 2 against vectors of the published reference, and against what it must reduce to."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_local.draft_config import DraftConfig, parse_draft_config
from dflash_local.sampling import SamplingParams
from tests.support.kits import DATA, Array
from tests.support.sampling_kits import LatticeProbe, SamplingKit, sampling_kits

FOLDER = DATA / "dflash2_tiny"
VARIANTS = {"full": "config.json", "swa_bidirectional": "config_swa_bidirectional.json"}
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=0.8, draft_temperature=0.8)

every_kit = pytest.mark.parametrize("kit", sampling_kits(), ids=lambda kit: kit.name)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, atol=5e-5, rtol=1e-4)


def config(name: str = "config.json") -> DraftConfig:
    return parse_draft_config(json.loads((FOLDER / name).read_text()))


def weights() -> dict[str, Array]:
    return load_file(FOLDER / "model.safetensors")


def inputs() -> dict[str, Any]:
    return load_file(FOLDER / "inputs.safetensors")


def opened(kit: SamplingKit, config: DraftConfig, weights: dict[str, Array]) -> LatticeProbe:
    given = inputs()
    return kit.lattice_draft(config, weights, given["target_embed"], given["target_lm_head"])


@every_kit
@pytest.mark.parametrize("variant", VARIANTS)
def test_three_calls_with_a_growing_context(kit: SamplingKit, variant: str) -> None:
    given, outputs = inputs(), load_file(FOLDER / "outputs.safetensors")
    draft = opened(kit, config(VARIANTS[variant]), weights())
    for call in (1, 2, 3):
        name = f"{variant}.call{call}"
        draft.append(given[f"ctx_call{call}"][0])
        block = [int(i) for i in given[f"block_call{call}"][0]]
        close(draft.hidden(block), outputs[f"{name}.hidden"][0])
        logits = draft.logits(block[0], 3)
        close(logits, outputs[f"{name}.logits_transformed"][0])
        assert logits.argmax(-1).tolist() == outputs[f"{name}.argmax_no_selector"][0].tolist()
        lattice = draft.lattice(block[0], 3)
        assert lattice.candidates.tolist() == outputs[f"{name}.candidate_ids"].tolist()
        close(
            np.take_along_axis(logits, lattice.candidates, axis=-1),
            outputs[f"{name}.unary"],
        )
        close(lattice.scores, outputs[f"{name}.lattice"])
        greedy = kit.chooser(GREEDY).path(lattice)
        assert greedy.ids.tolist() == outputs[f"{name}.greedy_path"].tolist()
        sampled = kit.sampled_path(lattice, WARM, given["uniforms"][call - 1])
        assert sampled.ids.tolist() == outputs[f"{name}.sampled_path"].tolist()
        close(sampled.q, outputs[f"{name}.sampled_q"])
        if variant == "full":
            for layer in (0, 1):
                close(draft.keys(layer), outputs[f"{name}.cache_k.{layer}"][0])
                close(draft.values(layer), outputs[f"{name}.cache_v.{layer}"][0])


@every_kit
def test_the_identity_convolution_is_version_1(kit: SamplingKit) -> None:
    given, tensors = inputs(), weights()
    for name in tensors:
        if name.endswith("base_kernel"):
            tensors[name] = np.zeros_like(tensors[name])
            tensors[name][:, 0] = 1.0
        elif name.endswith("kernel_projection.weight"):
            tensors[name] = np.zeros_like(tensors[name])
    raw = json.loads((FOLDER / "config.json").read_text())
    raw["architectures"] = ["DFlashDraftModel"]
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        del raw["dflash_config"][key]
    plain = kit.draft(
        parse_draft_config(raw), tensors, given["target_embed"], given["target_lm_head"]
    )
    convolved = opened(kit, config(), tensors)
    for draft in (plain, convolved):
        draft.append(given["ctx_call1"][0])
    block = [int(i) for i in given["block_call1"][0]]
    close(convolved.hidden(block), plain.hidden(block))
    close(convolved.logits(block[0], 3), plain.logits(block[0], 3))
    raw = json.loads((FOLDER / "config.json").read_text())
    raw["dflash_config"]["conv_kernel_size"] = 0
    alone = opened(
        kit, parse_draft_config(raw), {n: t for n, t in tensors.items() if "conv" not in n}
    )
    alone.append(given["ctx_call1"][0])
    close(alone.lattice(block[0], 3).scores, convolved.lattice(block[0], 3).scores)
    changed = opened(kit, config(), weights())
    changed.append(given["ctx_call1"][0])
    assert np.abs(changed.hidden(block) - plain.hidden(block)).max() > 0.1


@every_kit
@pytest.mark.parametrize("book", ["predecessor_codebook", "successor_codebook"])
def test_a_zero_codebook_takes_the_best_ids(kit: SamplingKit, book: str) -> None:
    given, tensors = inputs(), weights()
    trained = opened(kit, config(), tensors)
    name = f"candidate_selector.{book}"
    tensors = {**tensors, name: np.zeros_like(tensors[name])}
    draft = opened(kit, config(), tensors)
    differs = False
    for call in (1, 2, 3):
        anchor = int(given[f"block_call{call}"][0, 0])
        for probe in (draft, trained):
            probe.append(given[f"ctx_call{call}"][0])
        path = kit.chooser(GREEDY).path(draft.lattice(anchor, 3)).ids
        assert path.tolist() == draft.logits(anchor, 3).argmax(-1).tolist()
        differs |= (
            path.tolist() != kit.chooser(GREEDY).path(trained.lattice(anchor, 3)).ids.tolist()
        )
    assert differs, "the trained codebooks must choose otherwise somewhere"


@every_kit
def test_every_width_of_block(kit: SamplingKit) -> None:
    draft = opened(kit, config(), weights())
    draft.append(inputs()["ctx_call1"][0])
    for count in (1, 2, 3):
        lattice = draft.lattice(5, count)
        assert lattice.scores.shape == (count, 4, 4)
        assert kit.chooser(GREEDY).path(lattice).ids.shape == (count,)
