"""Attention over grouped K/V heads without repeating them: the group folds into the query rows.

The stock implementation copies every K/V head once per query head as soon as there is a mask and
more than one row, which makes a verify pay for the whole context several times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from dflash_local.memory_need import COLUMN_STEP, SCORES_AT_ONCE

from .torch_lane_attention import lane_attention, spelled_out

NAME = "folded_groups"  # transformers takes any name with "flash" for one of its own


def folded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of ``[1, heads, rows, dim]`` queries over ``[1, kv_heads, length, dim]`` K/V.

    K/V may lie as ``LaneRows`` has them. ``mask`` is additive, ``[groups * rows, length]`` (see
    ``additive_mask``), or None where every row sees everything. Returns ``[1, rows, heads, dim]``.
    """
    if _in_lanes(key):
        return lane_attention(query, key, value, mask, scale)
    _, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    folded = query.reshape(1, kv_heads, groups * rows, dim)
    if key.stride(-1) == value.stride(-1) == 1:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
        return out.view(heads, rows, -1).transpose(0, 1).unsqueeze(0)
    # Only bf16 on the CPU has K by columns; where its products are slow, they run in fp32.
    dtype = torch.float32 if widens() else query.dtype

    def attend(head: slice, row: slice) -> torch.Tensor:
        some, turned = folded[0, head, row].to(dtype), key[0, head].mT.to(dtype)
        if mask is None:
            scores = torch.bmm(some, turned).mul_(scale)
        else:
            added = mask[row].to(dtype).expand(len(some), -1, -1)
            scores = torch.baddbmm(added, some, turned, alpha=scale)
        return torch.bmm(scores.softmax(dim=-1), value[0, head].to(dtype)).to(query.dtype)

    out = _in_parts(attend, folded[0], value[0])
    return out.view(heads, rows, -1).transpose(0, 1).unsqueeze(0)


def _in_lanes(key: torch.Tensor) -> bool:
    return key.dim() > 4


def _in_parts(
    attend: Callable[[slice, slice], torch.Tensor], folded: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """``attend`` over all K/V heads and rows; some at a time where the scores of all would be more
    than ``SCORES_AT_ONCE``, as those of a long prompt are."""
    (heads, rows, _), length = folded.shape, value.shape[1]
    if heads * rows * length <= SCORES_AT_ONCE:
        return attend(slice(None), slice(None))
    out = folded.new_empty((heads, rows, value.shape[2]))
    step = max(1, SCORES_AT_ONCE // length)
    for head in (slice(index, index + 1) for index in range(heads)):
        for row in (slice(start, start + step) for start in range(0, rows, step)):
            out[head, row] = attend(head, row)
    return out


def empty_keys(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised buffer ``[..., rows, dim]`` for keys, laid out for ``folded_attention``.

    In bf16 on the CPU the products with a transposed K take half the time of the fused attention
    there (0.24 against 0.49 ms for 24 x 64 queries over 2,048 rows of 3 heads).
    """
    if _turned(dtype, device):
        *leading, rows, dim = shape
        return torch.empty((*leading, dim, rows), dtype=dtype, device=device).transpose(-1, -2)
    return torch.empty(shape, dtype=dtype, device=device)


def column_step(dtype: torch.dtype, device: torch.device) -> int:
    """The columns of K/V that ``folded_attention`` is given should be a multiple of it.

    The CPU's bf16 products are compiled anew for every shape, 0.4 ms each: with a length of its own
    in every round, twice for the target and twice for the draft.
    """
    return COLUMN_STEP if _turned(dtype, device) and not widens() else 1


def _turned(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype == torch.bfloat16


@cache
def widens() -> bool:
    """Whether this is a CPU that reads bf16 quickly and multiplies it slowly."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def additive_mask(visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """From a bool ``[rows, length]`` to ``[groups * rows, length]``: 0 where visible, else -inf."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf")).repeat(groups, 1)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The transformers attention interface over ``folded_attention``.

    The mask that the target's forward was given, ``[1, 1, groups * rows, length]``, arrives as is.
    """
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("attention with position_bias")
    mask = None if attention_mask is None else attention_mask[0, 0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    if sinks is None and softcap is None:
        return folded_attention(query, key, value, mask, scale), None
    assert sinks is None or isinstance(sinks, torch.Tensor)
    assert softcap is None or isinstance(softcap, float)
    return spelled_attention(query, key, value, mask, scale, sinks, softcap), None


def spelled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """``folded_attention`` step by step, for what the fused kernels lack.

    ``sinks`` ``[heads]`` are scores of a column without a value; ``softcap`` bounds the scores.
    """
    if _in_lanes(key):
        key, value = spelled_out(key, value)
    _, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    folded = query.reshape(kv_heads, groups * rows, dim)
    column = None
    if sinks is not None:
        column = sinks.to(query.dtype).view(kv_heads, groups, 1).expand(-1, -1, rows)
        column = column.reshape(kv_heads, groups * rows, 1)

    def attend(head: slice, row: slice) -> torch.Tensor:
        scores = torch.bmm(folded[head, row], key[0, head].mT).mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += mask[row]
        columns = scores.shape[-1]
        if column is not None:
            scores = torch.cat((scores, column[head, row]), dim=-1)
        return torch.bmm(scores.softmax(dim=-1)[..., :columns], value[0, head])

    out = _in_parts(attend, folded, value[0])
    return out.view(heads, rows, -1).transpose(0, 1).unsqueeze(0)


def register() -> str:
    """Make the function known to transformers and return its name; calling again is harmless."""
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
