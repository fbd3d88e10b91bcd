"""Reads a draft's checkpoint and binds it to its target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash_local.draft_config import DraftConfig
from dflash_local.weights import check_draft_ids, weight_files

from .torch_draft import TorchDraft
from .torch_target import TorchTarget


def load_draft(folder: Path, config: DraftConfig, target: TorchTarget, context: int) -> TorchDraft:
    """The draft in ``folder``, whose files were compared with ``config`` before.

    Raises:
        DraftMismatch: ids of the draft lie outside the target's vocabulary or its own embedding.
    """
    # States of version 2 drafts leave the range of fp16.
    wide = config.v2 is not None and target.dtype == torch.float16
    dtype = torch.float32 if wide else target.dtype
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        weights |= load_file(file)
    placed = {
        name: tensor.to(target.device, dtype if tensor.is_floating_point() else torch.long)
        for name, tensor in weights.items()
    }
    own_rows, offsets = weights.get("embed_tokens.weight"), weights.get("d2t")
    check_draft_ids(
        config,
        target.shape.vocab_size,
        None if own_rows is None else len(own_rows),
        None if offsets is None else offsets.tolist(),
    )
    config = replace(config, vocab_size=target.shape.vocab_size)
    return TorchDraft(
        config, placed, target.embed, lambda s: target.logits(s.to(target.dtype)), context
    )
