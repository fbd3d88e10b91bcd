"""Weight files without a framework: which there are, whether they are whole, what they hold."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_local.draft_config import DraftConfig
from dflash_local.errors import DraftMismatch, WeightsError

Shapes = dict[str, tuple[int, ...]]

_AGAIN = "Pull the model again."
CODEBOOKS = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)
"""Bare parameters: published files give them no ``.weight``."""

_PADDING = 0.01
"""Share by which one vocabulary may be padded further than another of the same tokenizer."""
_LONGEST_HEADER = 100_000_000
_REFUSED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        WeightsError: it is missing, unreadable, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing.", _AGAIN) from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read: {error}.", _AGAIN) from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds no JSON object.", _AGAIN)
    return value


def refuse_own_code(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a model that wants to run Python of its own.

    Raises:
        WeightsError: its config asks for it.
    """
    for key in ("auto_map", "model_file"):
        if config.get(key):
            raise WeightsError(
                f"{folder} wants to run code of its own ({key} in config.json).",
                "Models with their own code are never run; choose another repository.",
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, every one that its index names.

    Raises:
        WeightsError: there are none, only other formats, or one is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise WeightsError(f"{index} names no weights.", _AGAIN)
        files = [folder / name for name in sorted(set(map(str, mapping.values())))]
        for file in files:
            if file.parent != folder or not file.is_file():
                raise WeightsError(f"{file} is missing.", _AGAIN)
        return files
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    if not folder.is_dir():
        raise WeightsError(f"There is no folder {folder}.", _AGAIN)
    others = sorted(f.name for f in folder.iterdir() if f.suffix in (*_REFUSED, ".gguf"))
    if others:
        raise WeightsError(
            f"{folder} holds no safetensors, only {others[0]}.",
            "Choose a repository with safetensors; other formats are not read.",
        )
    raise WeightsError(f"{folder} holds no weights.", _AGAIN)


def tensor_shapes(file: Path) -> Shapes:
    """Names and shapes of the tensors in one safetensors file, checked against its size.

    Raises:
        WeightsError: the file is truncated or damaged.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise WeightsError(f"{file} is truncated or no safetensors file.", _AGAIN)
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} is damaged: {error}.", _AGAIN) from None
    if size != 8 + length + end:
        raise WeightsError(f"{file} has {size} bytes, its header says {8 + length + end}.", _AGAIN)
    return shapes


def folder_shapes(folder: Path) -> Shapes:
    """Names and shapes of all tensors of a model, every file checked."""
    shapes: Shapes = {}
    for file in weight_files(folder):
        shapes |= tensor_shapes(file)
    return shapes


def check_draft(folder: Path, config: DraftConfig) -> None:
    """Compare a draft's files with its config.

    Raises:
        WeightsError: a file is damaged.
        DraftMismatch: a tensor is missing, is none of a DFlash draft's, or has another shape than
            the config says.
    """
    found = folder_shapes(folder)
    expected = draft_shapes(config) | _own_shapes(found, config)
    for name, shape in expected.items():
        if name not in found:
            raise DraftMismatch(f"The draft in {folder} lacks {name}.", "Pull the draft again.")
        if found[name] != shape:
            raise DraftMismatch(
                f"The draft in {folder} holds {name} as {list(found[name])}, its config says "
                f"{list(shape)}.",
                "Pull the draft again.",
            )
    # A tensor that nothing reads is a part of the model that would silently be left out.
    for name in found.keys() - expected.keys():
        if not name.endswith("rotary_emb.inv_freq") and name != "t2d":
            raise DraftMismatch(
                f"The draft in {folder} holds {name}, which its config does not call for.",
                "Choose a DFlash draft whose config.json and weights belong together.",
            )


def stop_ids(folder: Path, others: Sequence[object], vocab_size: int) -> tuple[int, ...]:
    """Every end-of-sequence id: of generation_config.json, else the first of ``others`` there is.

    Raises:
        WeightsError: one is no id of the target, so that its answers would never end.
    """
    path = folder / "generation_config.json"
    own = read_json(path).get("eos_token_id") if path.is_file() else None
    found = next((ids for ids in (own, *others) if ids is not None), [])
    listed = found if isinstance(found, list) else [found]
    for item in listed:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise WeightsError(
                f"{folder}: eos_token_id is {found!r}, the target's ids are 0 to {vocab_size - 1}.",
                _AGAIN,
            )
    return tuple(listed)


def own_rows(folder: Path) -> int | None:
    """Ids that a draft's own embedding and codebooks know; None where it has none of them."""
    shapes = folder_shapes(folder)
    tables = ("embed_tokens.weight", *CODEBOOKS)
    return min((shapes[name][0] for name in tables if name in shapes), default=None)


def check_draft_ids(
    config: DraftConfig, vocab_size: int, own_rows: int | None, offsets: Sequence[int] | None
) -> None:
    """Ids that the draft reads or writes must exist on the other side.

    Args:
        config: the draft's numbers, as its file gives them.
        vocab_size: the target's ids.
        own_rows: see there.
        offsets: of a reduced vocabulary, from its ids to the target's; None without one.

    Raises:
        DraftMismatch: some do not.
    """
    choose = "Choose the draft that was trained for this target."
    if own_rows is not None and own_rows <= config.mask_token_id:
        raise DraftMismatch(
            f"The draft's mask id {config.mask_token_id} lies beyond its own embedding of "
            f"{own_rows} rows.",
            choose,
        )
    known = min(n for n in (own_rows, config.vocab_size, vocab_size) if n is not None)
    # Without tables of its own the draft uses the target's, which may only be padded further.
    if known < vocab_size * (1 - _PADDING if own_rows is None else 1):
        raise DraftMismatch(
            f"The draft knows {known} ids, the target has {vocab_size}.",
            choose,
        )
    ids = [index + offset for index, offset in enumerate(offsets or ())]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise DraftMismatch(
            f"The draft maps to ids {min(ids)} to {max(ids)}, the target has 0 to "
            f"{vocab_size - 1}.",
            choose,
        )
    if len(set(ids)) != len(ids):
        raise DraftMismatch("The draft maps two of its ids to the same id of the target.", choose)


def draft_shapes(config: DraftConfig) -> Shapes:
    """Every tensor that a draft's checkpoint holds at least, and its shape.

    The codebooks of version 2 are left out where the config leaves the vocabulary to the target.
    """
    hidden, middle, dim = config.hidden_size, config.intermediate_size, config.head_dim
    wide, narrow = config.heads * dim, config.kv_heads * dim
    taps = len(config.target_layer_ids) * config.target_hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, taps),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (wide, hidden),
            "self_attn.k_proj.weight": (narrow, hidden),
            "self_attn.v_proj.weight": (narrow, hidden),
            "self_attn.o_proj.weight": (hidden, wide),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
            "mlp.gate_proj.weight": (middle, hidden),
            "mlp.up_proj.weight": (middle, hidden),
            "mlp.down_proj.weight": (hidden, middle),
        }
        if config.attention_bias:
            layer |= {
                "self_attn.q_proj.bias": (wide,),
                "self_attn.k_proj.bias": (narrow,),
                "self_attn.v_proj.bias": (narrow,),
                "self_attn.o_proj.bias": (hidden,),
            }
        if (convolutions := config.convolutions) is not None:
            kernel, groups = convolutions.conv_kernel_size, hidden // convolutions.conv_group_size
            for conv in ("attention_conv", "mlp_conv"):
                layer[f"{conv}.base_kernel"] = (2, kernel, hidden)
                layer[f"{conv}.kernel_projection.weight"] = (2 * kernel * groups, hidden)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if config.v2 is not None:
        rank = config.v2.selector_rank
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        if config.vocab_size is not None:
            shapes |= dict.fromkeys(CODEBOOKS, (config.vocab_size, rank))
    return shapes


def _own_shapes(found: Shapes, config: DraftConfig) -> Shapes:
    """Tensors whose rows are ids: what a draft may bring along, its rows taken from the file."""
    shapes: Shapes = {}
    hidden = config.hidden_size
    reduced = config.draft_vocab_size
    rows = config.vocab_size or found.get("lm_head.weight", (0,))[0]
    if reduced is not None or "d2t" in found:
        rows = reduced or found["d2t"][0]
        shapes["d2t"] = (rows,)
    if "lm_head.weight" in found:
        shapes["lm_head.weight"] = (rows, hidden)
    if "embed_tokens.weight" in found:
        shapes["embed_tokens.weight"] = (found["embed_tokens.weight"][0], hidden)
    if config.v2 is not None and config.vocab_size is None:
        rows = found.get(CODEBOOKS[0], (0,))[0]
        shapes |= dict.fromkeys(CODEBOOKS, (rows, config.v2.selector_rank))
    return shapes
