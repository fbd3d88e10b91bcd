"""From scores to distributions, drawing from them, and testing drafted ids against them.

Pure and lazy functions in fp32. Leading axes (written ``...``) are independent answers: decoding
has none, the statistical tests have thousands.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dflash_local.sampling import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-22
"""Largest uniform: times a sum of fp32 it stays below that sum."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafted ids and the distribution that each was drawn from."""

    ids: mx.array
    """Int32 ``[..., count]``."""
    q: mx.array | None = None
    """``[..., count, width]``, rows of sum 1; None where nothing will be drawn against them."""
    candidates: mx.array | None = None
    """Ids of the columns of ``q``, ``[..., count, width]``, each at most once in a row."""


@dataclass(frozen=True, slots=True)
class Lattice:
    """Every step that a path through the candidates of the slots can take."""

    candidates: mx.array
    """Ids ``[..., count, width]``."""
    scores: mx.array
    """``[..., count, width, width]``: slot, index of the predecessor, index of the candidate.
    The first slot's predecessor is the anchor, whatever the index."""


def distribution(scores: mx.array, sampling: SamplingParams, temperature: float) -> mx.array:
    """Probabilities for scores ``[..., rows, vocab]``: temperature, top-k, softmax, top-p, min-p.

    top-p keeps an id while the mass before it is below top_p; ids of equal score share their fate.
    """
    scores = scores.astype(mx.float32)
    if 0 < sampling.top_k < scores.shape[-1]:
        worst = mx.topk(scores, sampling.top_k, axis=-1).min(axis=-1, keepdims=True)
        scores = mx.where(scores < worst, -mx.inf, scores)
    probs = mx.softmax(scores / temperature, axis=-1, precise=True)
    if sampling.top_p < 1.0:
        ranked = -mx.sort(-probs, axis=-1)
        # "Mass before below top_p" is "mass from here on above the rest": summed from the small
        # end it rounds less.
        onward = mx.cumsum(ranked, axis=-1, reverse=True)
        least = mx.where(onward > 1.0 - sampling.top_p, ranked, 2.0).min(axis=-1, keepdims=True)
        probs = mx.where(probs < mx.minimum(least, ranked[..., :1]), 0.0, probs)
    if sampling.min_p > 0.0:
        least = sampling.min_p * probs.max(axis=-1, keepdims=True)
        probs = mx.where(probs < least, 0.0, probs)
    if sampling.top_p < 1.0 or sampling.min_p > 0.0:
        probs = probs / probs.sum(axis=-1, keepdims=True)
    return probs


def inverse_cdf(probs: mx.array, uniforms: mx.array) -> mx.array:
    """Column drawn per row of ``probs`` ``[..., width]`` with ``uniforms`` ``[...]`` in [0, 1).

    The number of cumulative sums that the uniform reaches, so no column without mass is drawn.
    """
    sums = mx.cumsum(probs, axis=-1)
    reached = mx.minimum(uniforms, _BELOW_ONE)[..., None] * sums[..., -1:]
    return (sums <= reached).sum(axis=-1).astype(mx.int32)


def race(weights: mx.array, key: mx.array) -> mx.array:
    """Column drawn per row of ``weights`` ``[..., vocab]``, which need no sum of 1.

    By Gumbel noise: the library's own draw inverts the running sum, which rounds over a large
    vocabulary and can end on an id without any weight.
    """
    return mx.argmax(mx.log(weights) + mx.random.gumbel(weights.shape, key=key), axis=-1).astype(
        mx.int32
    )


def settle(probs: mx.array, drafted: Drafted, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """Test drafted ids against target rows ``probs`` ``[..., count + 1, vocab]``.

    An id is accepted while ``u * q < p`` with ``uniforms`` ``[..., count]``. Returns the accepted
    counts ``[..., 1]`` and the weights ``[..., vocab]`` of the next id: what the target's row has
    more than the draft's after a refusal, the last row after none.
    """
    ids, q, candidates = drafted.ids, drafted.q, drafted.candidates
    assert q is not None
    assert candidates is not None
    chosen_q = (q * (candidates == ids[..., None])).sum(axis=-1)
    chosen_p = mx.take_along_axis(probs[..., :-1, :], ids[..., None], axis=-1)[..., 0]
    accepted = leading_true(uniforms * chosen_q < chosen_p)
    row = take_row(probs, accepted)
    # One more row without mass, so that "all accepted" subtracts nothing.
    q = mx.concatenate([q, mx.zeros_like(q[..., :1, :])], axis=-2)
    candidates = mx.concatenate([candidates, candidates[..., :1, :]], axis=-2)
    where = take_row(candidates, accepted)
    less = mx.take_along_axis(row, where, axis=-1) - take_row(q, accepted)
    rest = mx.put_along_axis(row, where, mx.maximum(less, 0.0), axis=-1)
    # p equal to q up to rounding leaves nothing: then p itself.
    return accepted, mx.where(rest.sum(axis=-1, keepdims=True) > 0.0, rest, row)


def best(scores: mx.array) -> mx.array:
    """The best id per row."""
    return mx.argmax(scores, axis=-1).astype(mx.int32)


def best_columns(scores: mx.array, width: int) -> mx.array:
    """The ``width`` best ids per row, the best first."""
    columns = mx.argpartition(-scores, width - 1, axis=-1)[..., :width]
    order = mx.argsort(-mx.take_along_axis(scores, columns, axis=-1), axis=-1)
    return mx.take_along_axis(columns, order, axis=-1).astype(mx.int32)


def leading_true(flags: mx.array) -> mx.array:
    """How many flags ``[..., count]`` from the front are true, ``[..., 1]``."""
    return mx.cumprod(flags.astype(mx.int32), axis=-1).sum(axis=-1, keepdims=True).astype(mx.int32)


def take_row(rows: mx.array, index: mx.array) -> mx.array:
    """Row ``index`` ``[..., 1]`` of ``[..., rows, columns]``, as ``[..., columns]``."""
    return mx.take_along_axis(rows, index[..., None], axis=-2)[..., 0, :]


def walk(choices: mx.array) -> mx.array:
    """Path ``[..., count]`` of indices, where ``choices`` ``[..., count, width]`` holds the index
    chosen after each predecessor; it starts at index 0."""
    steps = [choices[..., 0, :1]]
    for slot in range(1, choices.shape[-2]):
        steps.append(mx.take_along_axis(choices[..., slot, :], steps[-1], axis=-1))
    return mx.concatenate(steps, axis=-1)


def sampled_path(lattice: Lattice, rows: mx.array, uniforms: mx.array) -> Drafted:
    """A path drawn from ``rows``, the lattice's distributions, one uniform ``[..., count]`` a slot.

    q is the row of the predecessor that the path really took.
    """
    path = walk(inverse_cdf(rows, mx.broadcast_to(uniforms[..., None], rows.shape[:-1])))
    before = mx.concatenate([mx.zeros_like(path[..., :1]), path[..., :-1]], axis=-1)
    q = take_row(rows, before[..., None])
    ids = mx.take_along_axis(lattice.candidates, path[..., None], axis=-1)[..., 0]
    return Drafted(ids, q, lattice.candidates)


def best_path(lattice: Lattice) -> Drafted:
    """The path that takes the best step each time; q is all on it."""
    path = walk(best(lattice.scores))
    return certain(mx.take_along_axis(lattice.candidates, path[..., None], axis=-1)[..., 0])


def certain(ids: mx.array) -> Drafted:
    """Ids that were not drawn: all of q lies on them."""
    return Drafted(ids, mx.ones((*ids.shape, 1), dtype=mx.float32), ids[..., None])
