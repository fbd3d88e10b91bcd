"""Reads a draft's checkpoint and binds it to its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from dflash_local.draft_config import DraftConfig
from dflash_local.errors import DraftMismatch

from .torch_draft import TorchDraft
from .torch_linear import LinearMaker, dense
from .torch_target import Target
from .torch_weights import TensorReader


def load_draft(
    folder: Path, config: DraftConfig, target: Target, context: int, maker: LinearMaker = dense
) -> TorchDraft:
    """The draft in ``folder``, whose files were compared with ``config`` before.

    Raises:
        DraftMismatch: ids of the draft lie outside the target's vocabulary or its own embedding.
    """
    # States of version 2 drafts leave the range of fp16.
    wide = config.v2 is not None and target.dtype == torch.float16
    dtype = torch.float32 if wide else target.dtype
    weights = TensorReader(folder, dtype, target.device)
    config = replace(config, vocab_size=target.shape.vocab_size)
    _check_ids(weights, config)
    return TorchDraft(
        config, weights, target.embed, lambda s: target.logits(s.to(target.dtype)), context, maker
    )


def _check_ids(weights: Mapping[str, torch.Tensor], config: DraftConfig) -> None:
    """Ids that the draft reads or writes exist on the other side."""
    choose = "Choose the draft that was trained for this target."
    embedding = weights.get("embed_tokens.weight")
    if embedding is not None and embedding.shape[0] <= config.mask_token_id:
        raise DraftMismatch(
            f"The draft's mask id {config.mask_token_id} lies beyond its own embedding of "
            f"{embedding.shape[0]} rows.",
            choose,
        )
    offsets, vocab = weights.get("d2t"), config.vocab_size
    if offsets is None or vocab is None:
        return
    ids = [index + offset for index, offset in enumerate(offsets.tolist())]
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab:
        raise DraftMismatch(
            f"The draft maps to ids {low} to {high}, the target has 0 to {vocab - 1}.", choose
        )
    if len(set(ids)) != len(ids):
        raise DraftMismatch("The draft maps two of its ids to the same id of the target.", choose)
