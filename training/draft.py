"""A new draft for a target: its numbers, and where its weights start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dflash_local.draft_config import DraftConfig, parse_draft_config, read_draft_config
from dflash_local.errors import DraftMismatch, OptionError
from dflash_local.weights import folder_shapes, weight_files

from .network import DraftNetwork
from .recipe import STARTS, FitRecipe
from .teacher import Teacher

_CONV_KERNEL, _CONV_GROUP, _CANDIDATES = 2, 16, 16


def tap_layers(layers: int, taps: int) -> tuple[int, ...]:
    """Evenly spread target layers, from the second to the third from the end."""
    if taps == 1 or layers < 5:
        spread = [layers // 2] if taps == 1 else range(min(taps, layers))
    else:
        spread = [round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps)]
    return tuple(sorted(set(spread)))


def mask_id(unused: torch.Tensor, special: Sequence[int], embedding_rows: int) -> int:
    """The id that stands for what is to be drafted.

    A special token that the corpus never shows, else the last id that it never shows.

    Args:
        unused: per id, whether the corpus lacks it.
        special: ids of special tokens.
        embedding_rows: rows of the target's embedding; some may belong to no token.
    """
    for token in sorted(special):
        if token < len(unused) and bool(unused[token]):
            return token
    free = unused.nonzero()[:, 0]
    return int(free[-1]) if len(free) else embedding_rows - 1


def check(fit: FitRecipe, hidden: int, layers: int, vocab: int, taps: Sequence[int]) -> None:
    """Refuse what cannot be fitted, before hours of prompts and answers.

    Args:
        fit: what is asked for.
        hidden: the target's hidden size.
        layers: how many it has.
        vocab: how many ids.
        taps: layers that are tapped.

    Raises:
        OptionError: numbers that cannot be, or ``init`` is no draft's folder.
        DraftMismatch: that draft was made for another target.
    """
    if fit.block < 2 or not 2 <= fit.short_block <= fit.block:
        raise OptionError(
            f"Blocks of {fit.short_block} and {fit.block} rows are asked for.",
            "Give 2 or more to --block, and no more than that to --short-block.",
        )
    if fit.draft_vocab is not None and not 2 <= fit.draft_vocab <= vocab:
        raise OptionError(
            f"A draft of {fit.draft_vocab} ids is asked for, the target has {vocab}.",
            "Give 2 to that to --draft-vocab, or leave it out.",
        )
    if fit.v2 and hidden % _CONV_GROUP:
        raise OptionError(
            f"Version 2 needs a hidden size that {_CONV_GROUP} divides, the target's is {hidden}.",
            "Leave --v2 out.",
        )
    if fit.init not in STARTS:
        _earlier_config(Path(fit.init), hidden, layers, vocab, taps)


def settings(
    target: Any, fit: FitRecipe, taps: Sequence[int], mask: int, positions: int
) -> dict[str, Any]:
    """A draft's config.json for a target's text config: the target's widths, fewer layers."""
    vocab = int(target.vocab_size)
    reduced = {} if fit.draft_vocab in (None, vocab) else {"draft_vocab_size": fit.draft_vocab}
    rope = getattr(target, "rope_parameters", None) or {}
    # Where layers differ (Gemma 4) the first one gives the widths.
    layer = (getattr(target, "per_layer_config", None) or [target])[0]
    heads = int(layer.num_attention_heads)
    nested: dict[str, Any] = {"target_layer_ids": list(taps), "mask_token_id": mask}
    if fit.v2 or fit.selector:
        nested |= {
            "conv_kernel_size": _CONV_KERNEL if fit.v2 else 0,
            "conv_group_size": _CONV_GROUP if fit.v2 else 1,
            "selector_rank": fit.selector_rank,
            "selector_top_k": min(_CANDIDATES, fit.draft_vocab or vocab),
        }
    return {
        "architectures": ["DFlash2DraftModel" if fit.v2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": int(target.hidden_size),
        "num_hidden_layers": fit.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(layer.num_key_value_heads),
        "head_dim": int(getattr(layer, "head_dim", None) or target.hidden_size // heads),
        "intermediate_size": int(layer.intermediate_size),
        "vocab_size": vocab,
        **reduced,
        "hidden_act": "silu",
        "rms_norm_eps": float(target.rms_norm_eps),
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "rope_scaling": None,
        "max_position_embeddings": positions,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * fit.layers,
        "sliding_window": None,
        "is_causal": False,
        "dtype": "bfloat16",
        "block_size": fit.block,
        "num_target_layers": int(target.num_hidden_layers),
        "dflash_config": nested,
    }


def start(
    fit: FitRecipe, raw: dict[str, Any], teacher: Teacher, positions: int
) -> tuple[DraftNetwork, dict[str, Any]]:
    """A network with its first weights, and the config it belongs to.

    A folder as ``init`` brings its own config, apart from the block's size.

    Raises:
        OptionError: ``init`` is neither a way to start nor a draft's folder.
        DraftMismatch: that draft is of another kind, or was made for another target.
    """
    torch.manual_seed(fit.seed)
    if fit.init not in STARTS:
        return _from_folder(Path(fit.init), fit, raw, teacher, positions)
    config = parse_draft_config(raw)
    network = DraftNetwork(config, positions)
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2 and "candidate_selector" not in name and "conv" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    if fit.init == "target":
        _copy_layers(network, config, teacher)
    return network, raw


def _copy_layers(network: DraftNetwork, config: DraftConfig, teacher: Teacher) -> None:
    """The target's last layers where shapes agree; the context starts as the last tap."""
    depth = int(teacher.config.num_hidden_layers)
    with torch.no_grad():
        for index in range(config.layers):
            layer = max(0, depth - config.layers) + index
            if layer >= depth:
                break
            theirs = teacher.named_layer(layer)
            for name, parameter in network.layers[index].named_parameters():
                tensor = theirs.get(name)
                if parameter.dim() == 2 and tensor is not None and tensor.shape == parameter.shape:
                    parameter.copy_(tensor.float())
        if config.target_hidden_size == config.hidden_size:
            network.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)


def _from_folder(
    folder: Path, fit: FitRecipe, raw: dict[str, Any], teacher: Teacher, positions: int
) -> tuple[DraftNetwork, dict[str, Any]]:
    layers = int(teacher.config.num_hidden_layers)
    hidden = int(teacher.config.hidden_size)
    config = _earlier_config(folder, hidden, layers, len(teacher.head), teacher.taps)
    own = dict(raw)
    own["num_hidden_layers"] = config.layers
    own["layer_types"] = ["full_attention"] * config.layers
    own["intermediate_size"] = config.intermediate_size
    own["dflash_config"] = raw["dflash_config"] | {"mask_token_id": config.mask_token_id}
    network = DraftNetwork(parse_draft_config(own), positions)
    folder_shapes(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
    tensors.pop("d2t", None)  # which ids the new draft can say follows from its own answers
    # What version 2 adds starts as the identity where the draft lacks it.
    missing, foreign = network.load_state_dict(tensors, strict=False)
    lacking = [name for name in missing if "conv" not in name and "selector" not in name]
    if lacking or foreign:
        raise DraftMismatch(
            f"The draft in {folder} does not have the shape asked for ({(lacking + foreign)[0]}).",
            "Give the options it was trained with.",
        )
    return network, own


def _earlier_config(
    folder: Path, hidden: int, layers: int, embedding_rows: int, taps: Sequence[int]
) -> DraftConfig:
    """The config of a draft to go on from."""
    if not (folder / "config.json").is_file():
        raise OptionError(
            f"--init {folder} is no folder with a draft.", "Give target, random or such a folder."
        )
    config = read_draft_config(folder)
    config.check_target(hidden_size=hidden, layers=layers, embedding_rows=embedding_rows)
    if config.target_layer_ids != tuple(taps):
        raise DraftMismatch(
            f"The draft in {folder} taps layers {config.target_layer_ids}, the data has "
            f"{tuple(taps)}.",
            "Give the same --taps from the start.",
        )
    return config
