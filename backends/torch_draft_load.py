"""Reads a draft's checkpoint and binds it to its target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from dflash_local.draft_config import DraftConfig
from dflash_local.weights import check_draft_ids, own_rows

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
    offsets = weights.get("d2t")
    check_draft_ids(
        config,
        target.shape.vocab_size,
        own_rows(folder),
        None if offsets is None else offsets.tolist(),
    )
    config = replace(config, vocab_size=target.shape.vocab_size)
    return TorchDraft(
        config, weights, target.embed, lambda s: target.logits(s.to(target.dtype)), context, maker
    )
