"""The draft as a module to train; its parameters carry the published tensor names.

One forward takes many blocks per sequence: the rows of a block see the sequence's context up to
their anchor, and each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from dflash_local.draft_config import DFlash2Config, DraftConfig

Sublayer = Callable[[torch.Tensor], torch.Tensor]


class DraftNetwork(nn.Module):
    """The trainable part of a draft.

    Args:
        config: its numbers; every layer has full attention in both directions.
        positions: the longest sequence and a block.
    """

    def __init__(self, config: DraftConfig, positions: int) -> None:
        super().__init__()
        self.config = config
        taps = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(taps, config.hidden_size, bias=False)
        self.hidden_norm = _norm(config.hidden_size, config)
        self.norm = _norm(config.hidden_size, config)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        if config.v2 is not None:
            assert config.vocab_size is not None
            self.candidate_selector = Selector(config.vocab_size, config.hidden_size, config.v2)
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float32),
            torch.tensor(config.rope.inverse_frequencies(config.head_dim)),
        )
        table = torch.cat((angles, angles), dim=-1)
        self.register_buffer("_cos", table.cos() * config.rope.attention_factor, persistent=False)
        self.register_buffer("_sin", table.sin() * config.rope.attention_factor, persistent=False)

    def forward(
        self, features: torch.Tensor, anchors: torch.Tensor, embedded: torch.Tensor
    ) -> torch.Tensor:
        """States after the final norm, ``[sequences, blocks, rows, hidden]``.

        Args:
            features: tapped states, ``[sequences, length, taps * target hidden]``.
            anchors: positions, ``[sequences, blocks]``.
            embedded: the blocks' rows, ``[sequences, blocks, rows, hidden]``.
        """
        count, length = features.shape[:2]
        blocks, rows = embedded.shape[1:3]
        context = self.hidden_norm(self.fc(features))
        positions = anchors[:, :, None] + torch.arange(rows, device=anchors.device)
        turn = self._turn(positions.reshape(count, blocks * rows))
        context_turn = self._turn(torch.arange(length, device=anchors.device)[None])
        mask = _visible(anchors, length, rows, self.config.heads // self.config.kv_heads)
        states = embedded.reshape(count, blocks * rows, -1)
        for layer in self.layers:
            states = layer(states, context, turn, context_turn, mask, rows)
        final: torch.Tensor = self.norm(states)
        return final.view(count, blocks, rows, -1)

    def _turn(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cast(torch.Tensor, self._cos), cast(torch.Tensor, self._sin)
        return cos[positions][:, None], sin[positions][:, None]


Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, ``[sequences or 1, 1, rows, head_dim]``."""


class _Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = _norm(config.hidden_size, config)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _norm(config.hidden_size, config)
        self.mlp = _FeedForward(config)
        convolutions = config.convolutions
        self._convolved = convolutions is not None
        if convolutions is not None:
            self.attention_conv = _Convolution(config.hidden_size, convolutions)
            self.mlp_conv = _Convolution(config.hidden_size, convolutions)

    def forward(
        self,
        states: torch.Tensor,
        context: torch.Tensor,
        turn: Turn,
        context_turn: Turn,
        mask: torch.Tensor,
        rows: int,
    ) -> torch.Tensor:
        def attend(normed: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = self.self_attn(normed, context, turn, context_turn, mask)
            return mixed

        normed = self.input_layernorm(states)
        mixed = self.attention_conv(normed, attend, rows) if self._convolved else attend(normed)
        states = states + mixed
        normed = self.post_attention_layernorm(states)
        mixed = self.mlp_conv(normed, self.mlp, rows) if self._convolved else self.mlp(normed)
        return states + cast(torch.Tensor, mixed)


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self._dim = dim = config.head_dim
        queries, keys = config.heads * dim, config.kv_heads * dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = _norm(dim, config)
        self.k_norm = _norm(dim, config)

    def forward(
        self,
        normed: torch.Tensor,
        context: torch.Tensor,
        turn: Turn,
        context_turn: Turn,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        query = _rotate(self.q_norm(self._heads(self.q_proj(normed))), turn)
        keys = torch.cat(
            (
                _rotate(self.k_norm(self._heads(self.k_proj(context))), context_turn),
                _rotate(self.k_norm(self._heads(self.k_proj(normed))), turn),
            ),
            dim=2,
        )
        values = torch.cat(
            (self._heads(self.v_proj(context)), self._heads(self.v_proj(normed))), dim=2
        )
        count, heads, rows, dim = query.shape
        # The query heads of a group read the same K/V: they are more rows of one head.
        folded = query.reshape(count, keys.shape[1], -1, dim)
        mixed = _attend(folded, keys, values, mask)
        mixed = mixed.reshape(count, heads, rows, dim).transpose(1, 2)
        out: torch.Tensor = self.o_proj(mixed.reshape(count, rows, heads * dim))
        return out

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        count, rows = projected.shape[:2]
        return projected.view(count, rows, -1, self._dim).transpose(1, 2)


class _FeedForward(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return out


class _Convolution(nn.Module):
    """Mixes a block's rows with those before them, ahead of a sublayer and behind it."""

    def __init__(self, hidden: int, config: DFlash2Config) -> None:
        super().__init__()
        self._taps, self._group = config.conv_kernel_size, config.conv_group_size
        base = torch.zeros(2, self._taps, hidden)
        base[:, 0] = 1.0  # with the projection at 0 this is the identity
        self.base_kernel = nn.Parameter(base)
        outputs = 2 * self._taps * hidden // self._group
        self.kernel_projection = nn.Linear(hidden, outputs, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, normed: torch.Tensor, sublayer: Sublayer, rows: int) -> torch.Tensor:
        count, length, hidden = normed.shape
        dynamic = self.kernel_projection(normed).view(count, length, 2, self._taps, -1, 1)
        shape = (2, self._taps, hidden // self._group, self._group)
        kernels = (self.base_kernel.view(shape) + dynamic).flatten(-2)
        mixed = sublayer(self._mix(normed, kernels[:, :, 0], rows))
        return self._mix(mixed, kernels[:, :, 1], rows)

    def _mix(self, states: torch.Tensor, kernels: torch.Tensor, rows: int) -> torch.Tensor:
        mixed = states * kernels[:, :, 0]
        blocks = states.view(len(states), -1, rows, states.shape[-1])
        for tap in range(1, min(self._taps, rows)):
            # Nothing crosses the edge of a block.
            shifted = F.pad(blocks[:, :, :-tap], (0, 0, tap, 0)).flatten(1, 2)
            mixed = mixed + shifted * kernels[:, :, tap]
        return mixed


class Selector(nn.Module):
    """Scores a slot's candidates by the id before them."""

    def __init__(self, vocab_size: int, hidden: int, config: DFlash2Config) -> None:
        super().__init__()
        self.width = config.selector_top_k
        rank = config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(
        self, before: torch.Tensor, candidates: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """What a step adds to the scores of ``candidates`` ``[slots, width]``."""
        gates = self.hidden_projection(states) * F.embedding(before, self.predecessor_codebook)
        after = F.embedding(candidates, self.successor_codebook)
        added: torch.Tensor = (after @ gates[..., None])[..., 0]
        return added


class _Norm(nn.RMSNorm):
    """In fp32 also where products run in bf16: mixed dtypes have no fused kernel."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states.float())


def _norm(size: int, config: DraftConfig) -> _Norm:
    return _Norm(size, eps=config.rms_norm_eps)


def _rotate(heads: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Half rotation of ``[sequences, heads, rows, dim]``."""
    low, high = heads.chunk(2, dim=-1)
    return heads * turn[0] + torch.cat((-high, low), dim=-1) * turn[1]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention under a mask as ``_visible`` gives it."""
    if mask.dtype == torch.bool:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    with torch.autocast("cpu", enabled=False):  # it would take the softmax in fp32
        query, keys, values = (t.to(mask.dtype) for t in (query, keys, values))
        scores = (query * query.shape[-1] ** -0.5) @ keys.mT
        mixed: torch.Tensor = (scores + mask).softmax(dim=-1) @ values
        return mixed


def _visible(anchors: torch.Tensor, length: int, rows: int, groups: int) -> torch.Tensor:
    """Which keys a row sees, ``[sequences, 1, groups * n, length + n]``, n blocks * rows: the
    context ahead of the anchor, and the rows of the own block.

    A bool mask; or one to add, for bf16 on the CPU, where the products one by one take half the
    time of the fused kernels: 32 against 65 ms, gradients included, for 16 x 3 x 576 queries over
    440 keys.
    """
    count, blocks = anchors.shape
    device = anchors.device
    starts = anchors.repeat_interleave(rows, dim=1)[:, :, None]
    context = torch.arange(length, device=device) < starts
    owner = torch.arange(blocks, device=device).repeat_interleave(rows)
    own = (owner[:, None] == owner[None, :]).expand(count, -1, -1)
    visible = torch.cat((context, own), dim=-1).repeat(1, groups, 1)[:, None]
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return visible
    hidden = torch.zeros(visible.shape, dtype=torch.get_autocast_dtype("cpu"))
    return hidden.masked_fill_(~visible, float("-inf"))
