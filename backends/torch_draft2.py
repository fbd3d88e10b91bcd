"""What DFlash 2 adds to a draft: convolutions around the sublayers, and the candidate selector.

Formulas, names and tensor layout follow the published reference (version 2 of the format).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from dflash_local.draft_config import DFlash2Config

from .torch_probs import Lattice


class Convolution:
    """Mixes each row of a block with the rows before it, ahead of a sublayer and behind it.

    Args:
        weights: the checkpoint's tensors.
        name: where this convolution lies, for example ``layers.0.attention_conv``.
        config: kernel and group size.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], name: str, config: DFlash2Config
    ) -> None:
        self._base = weights[f"{name}.base_kernel"]
        self._projection = weights[f"{name}.kernel_projection.weight"]
        self._taps = config.conv_kernel_size
        self._group = config.conv_group_size

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The weights."""
        return self._base, self._projection

    def around(
        self, normed: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """``sublayer`` on block rows ``[rows, hidden]``, convolved on both sides.

        Both sides take their coefficients from the rows as they came.
        """
        rows, hidden = normed.shape
        dynamic = F.linear(normed, self._projection).view(rows, 2, self._taps, -1, 1)
        groups = (rows, 2, self._taps, hidden // self._group, self._group)
        base = self._base.view(1, *groups[1:])
        kernels = (base + dynamic).reshape(rows, 2, self._taps, hidden)
        return _mix(sublayer(_mix(normed, kernels[:, 0])), kernels[:, 1])


def _mix(states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Rows ``[rows, hidden]`` under kernels ``[rows, taps, hidden]``: tap t reads t rows back, and
    nothing comes before the first row."""
    mixed = states * kernel[:, 0]
    for tap in range(1, min(kernel.shape[1], states.shape[0])):
        mixed[tap:] += states[:-tap] * kernel[tap:, tap]
    return mixed


class Selector:
    """Scores the steps between the candidates of neighbouring slots.

    Args:
        weights: the checkpoint's tensors; the codebooks carry no ``.weight``.
        config: how many candidates a slot has.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], config: DFlash2Config) -> None:
        self._before = weights["candidate_selector.predecessor_codebook"]
        self._after = weights["candidate_selector.successor_codebook"]
        self._projection = weights["candidate_selector.hidden_projection.weight"]
        self.width = config.selector_top_k
        """Candidates of a slot."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The weights."""
        return self._before, self._after, self._projection

    def lattice(self, scores: torch.Tensor, states: torch.Tensor, anchor: torch.Tensor) -> Lattice:
        """Every step from ``anchor`` ``[1]`` on.

        ``scores`` ``[count, vocab]`` are the head's, after multiplier and cap: the bilinear term
        was trained on that scale. ``states`` ``[count, hidden]`` come after the final norm.
        """
        scores = scores[:, : self._after.shape[0]].float()
        unary, candidates = scores.topk(min(self.width, scores.shape[1]), dim=-1)
        return Lattice(candidates, unary[:, None] + self._pairs(candidates, states, anchor))

    def steps(
        self,
        states: torch.Tensor,
        anchor: torch.Tensor,
        candidates: torch.Tensor,
        unary: torch.Tensor,
    ) -> torch.Tensor:
        """Log probabilities ``[count, width, width]`` of the steps, from those of the candidates
        themselves, ``[count, 1, width]``; what the other ids have together stays theirs."""
        steps = unary + self._pairs(candidates, states, anchor)
        return steps.log_softmax(dim=-1) + unary.logsumexp(dim=-1, keepdim=True)

    def _pairs(
        self, candidates: torch.Tensor, states: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        gates = F.linear(states.to(self._projection.dtype), self._projection).float()
        before = torch.cat((anchor.expand(1, candidates.shape[1]), candidates[:-1]))
        # The target may have more ids than the codebooks.
        most = self._after.shape[0] - 1
        predecessors = self._before[before.clamp(max=most)].float()
        successors = self._after[candidates.clamp(max=most)].float()
        return (predecessors * gates[:, None]) @ successors.transpose(1, 2)
