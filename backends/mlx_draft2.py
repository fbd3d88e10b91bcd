"""What DFlash 2 adds to a draft: convolutions around the sublayers, and the candidate selector.

Formulas, names and tensor layout follow the published reference (version 2 of the format).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from dflash_local.draft_config import DFlash2Config

from .mlx_probs import Lattice, best_columns


class Convolution:
    """Mixes each row of a block with the rows before it, ahead of a sublayer and behind it.

    Its projection is never packed: it is small, and errors in it reach every channel.

    Args:
        weights: the checkpoint's tensors.
        name: where this convolution lies, for example ``layers.0.attention_conv``.
        config: kernel and group size.
    """

    def __init__(self, weights: Mapping[str, mx.array], name: str, config: DFlash2Config) -> None:
        self._base = weights[f"{name}.base_kernel"]
        self._projection = weights[f"{name}.kernel_projection.weight"]
        self._taps = config.conv_kernel_size
        self._group = config.conv_group_size

    def arrays(self) -> list[mx.array]:
        """The weights."""
        return [self._base, self._projection]

    def around(self, normed: mx.array, sublayer: Callable[[mx.array], mx.array]) -> mx.array:
        """``sublayer`` on block rows ``[rows, hidden]``, convolved on both sides.

        Both sides take their coefficients from the rows as they came.
        """
        rows, hidden = normed.shape
        dynamic = (normed @ self._projection.T).reshape(rows, 2, self._taps, -1, 1)
        base = self._base.reshape(1, 2, self._taps, -1, self._group)
        kernels = (base + dynamic).reshape(rows, 2, self._taps, hidden)
        return _mix(sublayer(_mix(normed, kernels[:, 0])), kernels[:, 1])


def _mix(states: mx.array, kernel: mx.array) -> mx.array:
    """Rows ``[rows, hidden]`` under kernels ``[rows, taps, hidden]``: tap t reads t rows back, and
    nothing comes before the first row."""
    mixed = states * kernel[:, 0]
    for tap in range(1, min(kernel.shape[1], states.shape[0])):
        shifted = mx.concatenate([mx.zeros_like(states[:tap]), states[:-tap]])
        mixed = mixed + shifted * kernel[:, tap]
    return mixed


class Selector:
    """Scores the steps between the candidates of neighbouring slots.

    Args:
        weights: the checkpoint's tensors; the codebooks carry no ``.weight``.
        config: how many candidates a slot has.
    """

    def __init__(self, weights: Mapping[str, mx.array], config: DFlash2Config) -> None:
        self._before = weights["candidate_selector.predecessor_codebook"]
        self._after = weights["candidate_selector.successor_codebook"]
        self._projection = weights["candidate_selector.hidden_projection.weight"]
        self.width = config.selector_top_k
        """Candidates of a slot."""

    def arrays(self) -> list[mx.array]:
        """The weights."""
        return [self._before, self._after, self._projection]

    def lattice(self, scores: mx.array, states: mx.array, anchor: mx.array) -> Lattice:
        """Every step from ``anchor`` ``[1]`` on.

        ``scores`` ``[count, vocab]`` are the head's, after multiplier and cap: the bilinear term
        was trained on that scale. ``states`` ``[count, hidden]`` come after the final norm.
        """
        scores = scores[:, : self._after.shape[0]].astype(mx.float32)
        candidates = best_columns(scores, min(self.width, scores.shape[1]))
        unary = mx.take_along_axis(scores, candidates, axis=-1)
        return Lattice(candidates, unary[:, None] + self._pairs(candidates, states, anchor))

    def linked(self, lattice: Lattice, states: mx.array, anchor: mx.array) -> Lattice:
        """A lattice of independent slots, as log probabilities, whose steps depend on each other;
        what the other ids have together stays theirs."""
        unary = lattice.scores[:, :1]
        steps = unary + self._pairs(lattice.candidates, states, anchor)
        steps = steps - mx.logsumexp(steps, axis=-1, keepdims=True)
        return Lattice(lattice.candidates, steps + mx.logsumexp(unary, axis=-1, keepdims=True))

    def _pairs(self, candidates: mx.array, states: mx.array, anchor: mx.array) -> mx.array:
        gates = (states @ self._projection.T).astype(mx.float32)
        first = mx.broadcast_to(anchor.astype(mx.int32), (1, candidates.shape[1]))
        before = mx.concatenate([first, candidates[:-1].astype(mx.int32)])
        # The target may have more ids than the codebooks.
        most = self._after.shape[0] - 1
        predecessors = self._before[mx.minimum(before, most)].astype(mx.float32)
        successors = self._after[mx.minimum(candidates, most)].astype(mx.float32)
        pairs: mx.array = (predecessors * gates[:, None]) @ successors.swapaxes(1, 2)
        return pairs
