"""The ids in a target's cache, as penalties see them; the arithmetic is the backend's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from dflash_local.sampling import SamplingParams

A = TypeVar("A")


class Arithmetic(Protocol[A]):
    """Penalties on a backend's arrays."""

    def count(self, ids: Sequence[int]) -> A:
        """Occurrences of every id, ``[vocab]``."""
        ...

    def add(self, left: A, right: A) -> A:
        """The sum of two counts."""
        ...

    def penalise(
        self, scores: A, sampling: SamplingParams, prompt: A, answer: A, following: A | None
    ) -> A:
        """Scores ``[rows, vocab]``, where row j has the first j + 1 of ``following`` behind the
        counted ids."""
        ...


class PenaltyHistory(Generic[A]):
    """Counts committed ids; those of an open block are added row by row while it is judged.

    So a refused draft leaves nothing to undo. The answer begins behind the last ``extend``: what
    lies before it is the prompt.

    Args:
        arithmetic: penalties on the backend's arrays.
    """

    def __init__(self, arithmetic: Arithmetic[A]) -> None:
        self._arithmetic = arithmetic
        self._ids: list[int] = []
        self._begin = 0
        self._sampling: SamplingParams | None = None
        self._counts: tuple[A, A] | None = None
        """Occurrences in the prompt and in the answer; None until asked for."""

    def configure(self, sampling: SamplingParams) -> None:
        """Set the penalties."""
        self._sampling = sampling if sampling.penalised else None
        self._restart()

    @property
    def active(self) -> bool:
        """Whether there are penalties at all."""
        return self._sampling is not None

    def rewind(self, position: int) -> None:
        """Forget every id from ``position`` on."""
        del self._ids[position:]
        self._restart()

    def extend(self, ids: Sequence[int]) -> None:
        """Ids of the prompt."""
        self._ids.extend(ids)
        self._restart()

    def commit(self, ids: Sequence[int]) -> None:
        """Ids of the answer."""
        self._ids.extend(ids)
        if self._counts is not None:
            prompt, answer = self._counts
            self._counts = prompt, self._arithmetic.add(answer, self._arithmetic.count(ids))

    def adjust(self, scores: A, following: A | None = None) -> A:
        """Scores ``[rows, vocab]`` after the penalties; ``following`` as in ``Arithmetic``."""
        if self._sampling is None:
            return scores
        if self._counts is None:
            count = self._arithmetic.count
            prompt, answer = self._ids[: self._begin], self._ids[self._begin :]
            self._counts = count(prompt), count(answer)
        return self._arithmetic.penalise(scores, self._sampling, *self._counts, following)

    def _restart(self) -> None:
        self._begin, self._counts = len(self._ids), None
