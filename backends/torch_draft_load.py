"""Reads a draft's checkpoint and binds it to its target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from dflash_local.draft_config import DraftConfig
from dflash_local.target_shape import is_tied
from dflash_local.weights import check_draft_ids, own_rows, read_json

from .torch_draft import TorchDraft
from .torch_draft_context import SlicedContext
from .torch_draft_context_device import DeviceContext
from .torch_linear import LinearMaker, dense
from .torch_target import Target
from .torch_weights import TensorReader


def load_draft(
    folder: Path,
    config: DraftConfig,
    target: Target,
    context: int,
    maker: LinearMaker = dense,
    *,
    graphs: bool = False,
    target_dir: Path | None = None,
    light: bool = False,
) -> TorchDraft:
    """The draft in ``folder``, whose files were compared with ``config`` before.

    ``graphs`` asks for a context whose passes can be captured. ``target_dir`` is where the target's
    files lie: of its head a reduced vocabulary needs a few rows only. ``light`` says that
    ``maker`` rounds fp32 states as they come: those in 16 bits would go to and fro at each product.

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
    rows = None
    if offsets is not None and "lm_head.weight" not in weights and target_dir is not None:
        rows = _head_rows(target_dir, torch.arange(len(offsets)) + offsets.cpu())
    return TorchDraft(
        config,
        weights,
        target.embed,
        lambda states: target.logits(states.to(target.dtype)),
        context,
        maker,
        DeviceContext if graphs else SlicedContext,
        None if rows is None else rows.to(target.device, dtype),
        torch.float32 if light and config.convolutions is None else None,
    )


def _head_rows(target_dir: Path, ids: torch.Tensor) -> torch.Tensor | None:
    """Rows of the target's output head, or None where it is not stored as numbers."""
    stored = TensorReader(target_dir, torch.float32, torch.device("cpu"))
    tied = is_tied(read_json(target_dir / "config.json"))
    for ending in ("lm_head.weight", "embed_tokens.weight")[tied:]:
        for name in stored:
            if name.endswith(ending):
                rows = stored.raw(name, ids)
                return rows if rows.is_floating_point() and rows.dim() == 2 else None
    return None
