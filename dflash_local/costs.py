"""What a round costs on this machine, by the number of drafted ids: measured, then remembered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter

from dflash_local import paths
from dflash_local.backend import Backend
from dflash_local.sampling import SamplingParams
from dflash_local.whole_file import write_whole

_CONTEXT = 32
"""Ids of context while measuring; live rounds correct for deeper ones."""
_LEAST, _MOST, _SECONDS = 5, 15, 2.0
"""Rounds of every count: so many at least, so many at most, and no more after that time."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of a whole round that drafts 0, 1, .. ids, one less than it has rows."""

    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.ms or not all(0.0 < value < 1e7 for value in self.ms):
            raise ValueError(f"not the costs of a round: {self.ms}")

    def of(self, rows: int) -> Costs:
        """Those of rounds of at most so many rows."""
        return Costs(self.ms[: max(1, rows)])


def measured_counts(rows: int) -> tuple[int, ...]:
    """The counts worth timing: few where rounds are many, all of them up to 6, as kernels that take
    so many rows at once cost far more for one row more."""
    ladder = (0, 1, 2, 3, 4, 5, 6, 8, 11, 15, 23, 31)
    return tuple(sorted({c for c in ladder if c < rows} | {rows - 1}))


def interpolated(points: Sequence[tuple[int, float]], size: int) -> tuple[float, ...]:
    """Values for ``0 .. size - 1`` on straight lines between sorted points."""
    values: list[float] = []
    for count in range(size):
        below = max((p for p in points if p[0] <= count), default=points[0])
        above = min((p for p in points if p[0] >= count), default=points[-1])
        share = (count - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
        values.append(below[1] + share * (above[1] - below[1]))
    return tuple(values)


def measure(backend: Backend) -> Costs:
    """Time a few rounds of each count on a short context, and leave the cache empty.

    The middle one of several is taken: a moment's work of others does not move it, and it is nearer
    than the least to what rounds take in the long run, which counts against a plain step's.
    """
    info, greedy = backend.info, SamplingParams()
    backend.configure(greedy)
    rows = info.rows(greedy)
    context = max(1, min(_CONTEXT, info.context - rows))
    counts = [c for c in measured_counts(rows) if context + c + 1 <= info.context]
    if not counts:  # room for one token: nothing will ever be drafted
        return Costs((1.0,) * rows)
    times: dict[int, list[float]] = {count: [] for count in counts}
    _pass(backend, counts, context)  # the first run of a shape also pays for its preparation
    begun = perf_counter()
    for done in range(_MOST):
        if done >= _LEAST and perf_counter() - begun > _SECONDS:
            break
        for count, ms in _pass(backend, counts, context):
            times[count].append(ms)
    backend.rewind(0)
    middle = {count: median(taken) for count, taken in times.items()}
    return Costs(interpolated(undisturbed(middle), rows))


def _pass(backend: Backend, counts: Sequence[int], context: int) -> list[tuple[int, float]]:
    """Milliseconds of one round of each count, in turn, so that a busy moment hits all alike."""
    info = backend.info
    token = 1 % info.vocab_size
    times: list[tuple[int, float]] = []
    for count in counts:
        if not times or backend.position + count + 1 > info.context:
            backend.rewind(0)
            backend.extend([token] * context)
            backend.sample()
        begun = perf_counter()
        backend.verify(backend.propose(token, count))
        backend.commit(1)
        times.append((count, 1000.0 * (perf_counter() - begun)))
    return times


def undisturbed(times: Mapping[int, float]) -> list[tuple[int, float]]:
    """Times by count without those that something else made longer than a wider round's."""
    counts = sorted(times, reverse=True)
    least = accumulate((times[count] for count in counts), min)
    return list(zip(counts, least, strict=True))[::-1]


def costs_of(backend: Backend, folder: Path | None = None) -> Costs:
    """The costs for this pair, machine and library versions; measured once, then read back.

    Args:
        folder: where they are remembered; a part of the cache folder by default.
    """
    file = (folder or costs_folder()) / f"{_key(backend)}.json"
    try:
        remembered = Costs(tuple(map(float, json.loads(file.read_text(encoding="utf-8"))["ms"])))
        if len(remembered.ms) == backend.info.rows(SamplingParams()):
            return remembered
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass  # missing or damaged: measure again
    costs = measure(backend)
    with suppress(OSError):  # what cannot be written costs seconds at the next load, nothing else
        write_whole(file, json.dumps({"ms": costs.ms}))
    return costs


def costs_folder() -> Path:
    """Where measured costs are remembered; safe to delete."""
    return paths.cache_dir() / "costs"


def _key(backend: Backend) -> str:
    """Tells pairs apart by what is known of them, and by what their weights take: a draft may be
    trained anew in its place, and bits have no other mark."""
    info, memory = backend.info, backend.memory()
    facts = [getattr(info, name) for name in info.__slots__ if name != "stop_ids"]
    return hashlib.sha256(repr([*facts, memory.weights, memory.draft]).encode()).hexdigest()[:16]
