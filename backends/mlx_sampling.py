"""Lossless sampling: the target's own distribution, whatever the draft proposes.

A drafted id is accepted with probability ``min(1, p / q)``; at the first refusal the next id comes
from what ``p`` has over ``q``. This is exact because ``q`` is the very distribution that the id was
drawn from, and because draft, acceptance and replacement use random numbers of their own. All of it
is part of the graph, in fp32.
"""

from __future__ import annotations

import random

import mlx.core as mx

from dflash_local.sampling import SamplingParams

from .mlx_choice import Drafted


class Sampler:
    """Draws ids under one setting.

    Args:
        sampling: temperature above 0, filters, and the seed.
        greedy_draft: the draft takes its best ids instead of drawing.
    """

    def __init__(self, sampling: SamplingParams, *, greedy_draft: bool = False) -> None:
        self._sampling = sampling
        self._greedy_draft = greedy_draft
        seed = random.SystemRandom().getrandbits(63) if sampling.seed is None else sampling.seed
        self._key = mx.random.key(seed)

    def pick(self, logits: mx.array) -> mx.array:
        """One id drawn from the target's distribution."""
        return draw(probabilities(logits, self._sampling), self._fresh_key())

    def draft(self, logits: mx.array) -> Drafted:
        """An id per slot, and the distribution that it was drawn from."""
        if self._greedy_draft:
            return Drafted(mx.argmax(logits, axis=-1).astype(mx.int32))
        q = probabilities(logits, self._sampling)
        return Drafted(draw(q, self._fresh_key()), q)

    def judge(self, logits: mx.array, drafted: Drafted | None) -> mx.array:
        """Accept or refuse slot by slot, then draw the id that follows."""
        p = probabilities(logits, self._sampling)
        if drafted is None:
            return mx.concatenate([mx.zeros((1,), mx.int32), draw(p, self._fresh_key())])
        q = one_hot(drafted.ids, p.shape[-1]) if drafted.q is None else drafted.q
        uniforms = mx.random.uniform(shape=drafted.ids.shape, key=self._fresh_key())
        accepted = count_accepted(p, q, drafted.ids, uniforms)
        following = draw(replacement(p, q, accepted), self._fresh_key())
        return mx.concatenate([accepted, following, drafted.ids])

    def _fresh_key(self) -> mx.array:
        self._key, fresh = mx.random.split(self._key)
        return fresh


def probabilities(logits: mx.array, sampling: SamplingParams) -> mx.array:
    """Rows of ``logits`` after temperature, top-k, softmax, top-p and min-p, in this order."""
    scores = logits.astype(mx.float32) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = mx.min(mx.topk(scores, sampling.top_k, axis=-1), axis=-1, keepdims=True)
        scores = mx.where(scores < least, -mx.inf, scores)
    rows = mx.softmax(scores, axis=-1, precise=True)
    if sampling.top_p < 1.0:
        order = mx.argsort(-rows, axis=-1)
        falling = mx.take_along_axis(rows, order, axis=-1)
        before = mx.cumsum(falling, axis=-1, inclusive=False)
        kept = mx.where(before < sampling.top_p, falling, 0.0)
        rows = mx.put_along_axis(mx.zeros_like(rows), order, kept, axis=-1)
    if sampling.min_p > 0.0:
        best = mx.max(rows, axis=-1, keepdims=True)
        rows = mx.where(rows < sampling.min_p * best, 0.0, rows)
    return rows / mx.sum(rows, axis=-1, keepdims=True)


def count_accepted(p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array) -> mx.array:
    """How many ids from the front pass ``u * q < p``, as int32 ``[1]``."""
    column = ids[:, None]
    target = mx.take_along_axis(p[:-1], column, axis=-1)[:, 0]
    draft = mx.take_along_axis(q, column, axis=-1)[:, 0]
    passed = (uniforms * draft < target).astype(mx.int32)
    return mx.cumprod(passed).sum(keepdims=True).astype(mx.int32)


def replacement(p: mx.array, q: mx.array, accepted: mx.array) -> mx.array:
    """Distribution ``[1, vocab]`` of the id after the accepted ones.

    Where every slot was accepted nothing is taken away; where rounding leaves nothing, ``p``
    serves.
    """
    padded = mx.concatenate([q, mx.zeros_like(q[:1])])
    own = mx.take(p, accepted, axis=0)
    rest = mx.maximum(own - mx.take(padded, accepted, axis=0), 0.0)
    mass = mx.sum(rest, axis=-1, keepdims=True)
    return mx.where(mass > 0.0, rest / mx.where(mass > 0.0, mass, 1.0), own)


def draw(rows: mx.array, key: mx.array) -> mx.array:
    """One id per row of probabilities; never one without any.

    By Gumbel noise: an inverse of the summed probabilities would round over a large vocabulary.
    """
    noise = mx.random.gumbel(rows.shape, key=key)
    return mx.argmax(mx.log(rows) + noise, axis=-1).astype(mx.int32)


def one_hot(ids: mx.array, size: int) -> mx.array:
    """Rows with all mass on one id each."""
    return (mx.arange(size)[None] == ids[:, None]).astype(mx.float32)
