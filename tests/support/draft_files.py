"""Random drafts for the tiny target, in every published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tests.support.kits import DATA
from tests.support.tiny import loop_pair

Tensors = dict[str, npt.NDArray[Any]]
V2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}


def v2_tensors(tensors: Tensors, *, strength: float = 0.3) -> Tensors:
    """Tensors of a version 1 draft, with convolutions near the identity and a selector."""
    rng = np.random.default_rng(4)
    vocab, hidden, rank, groups = 128, 64, 8, 4

    def noise(*shape: int) -> npt.NDArray[np.float32]:
        return (strength * rng.normal(size=shape)).astype(np.float32)

    added: Tensors = {}
    for layer in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            base = noise(2, 2, hidden)
            base[:, 0] += 1.0
            added[f"layers.{layer}.{conv}.base_kernel"] = base
            name = f"layers.{layer}.{conv}.kernel_projection.weight"
            added[name] = 0.1 * noise(4 * groups, hidden)
    added["candidate_selector.predecessor_codebook"] = noise(vocab, rank)
    added["candidate_selector.successor_codebook"] = noise(vocab, rank)
    added["candidate_selector.hidden_projection.weight"] = noise(rank, hidden)
    return {**tensors, **added}


def v2_pair(folder: Path, **added: Any) -> tuple[Path, Path]:
    """The tiny target and a version 2 draft in Z Lab's layout; ``added`` goes to its block."""
    target, draft = loop_pair(folder)
    path = draft / "model.safetensors"
    save_file(v2_tensors(load_file(path)), path)
    edit(draft, {"architectures": ["DFlash2DraftModel"]}, {**V2, **added})
    return target, draft


def selector_pair(folder: Path) -> tuple[Path, Path]:
    """The same with a selector and no convolutions."""
    target, draft = v2_pair(folder, conv_kernel_size=0)
    path = draft / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if "_conv." not in name}, path)
    return target, draft


def edit(draft: Path, top: dict[str, Any], nested: dict[str, Any]) -> None:
    """Set keys of a config, and of a draft's nested block."""
    config = json.loads((draft / "config.json").read_text())
    config |= top
    if nested:
        config["dflash_config"] = {**config["dflash_config"], **nested}
    (draft / "config.json").write_text(json.dumps(config))


def speculators_pair(
    folder: Path, *, version: int = 1, kept: list[int] | None = None
) -> tuple[Path, Path]:
    """The same in the ``speculators`` layout; ``kept`` are the ids of a reduced vocabulary."""
    target, draft = loop_pair(folder)
    flat = json.loads((draft / "config.json").read_text())
    nested = flat.pop("dflash_config")
    tensors = load_file(draft / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if version == 1 else "DFlash2DraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in nested["target_layer_ids"]],
        "block_size": flat.pop("block_size"),
        "mask_token_id": nested["mask_token_id"],
        "draft_vocab_size": 128 if kept is None else len(kept),
        "transformer_layer_config": flat,
    }
    flat.pop("architectures")
    if version == 2:
        config |= V2
        tensors = v2_tensors(tensors)
    if kept is not None:
        head = load_file(DATA / "loop" / "target.safetensors")["lm_head.weight"]
        tensors["lm_head.weight"] = head[kept]
        tensors["d2t"] = np.array(kept) - np.arange(len(kept))
        tensors["t2d"] = np.isin(np.arange(128), kept)
    save_file(tensors, draft / "model.safetensors")
    (draft / "config.json").write_text(json.dumps(config))
    return target, draft
