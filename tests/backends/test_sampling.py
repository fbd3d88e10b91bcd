"""Sampling and penalties through the seam, on a tiny pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dflash_local.backend import Backend
from dflash_local.events import Done
from dflash_local.loop import generate
from dflash_local.sampling import SamplingParams
from dflash_local.text import ReplyText
from dflash_local.width import FixedWidth
from tests.support.draft_files import v2_pair
from tests.support.driving import PROMPT, plain
from tests.support.kits import Options
from tests.support.sampling_kits import SamplingKit, sampling_kits
from tests.support.tiny import loop_pair

WARM = {"temperature": 1.0, "seed": 11}


@pytest.fixture(params=sampling_kits(), ids=lambda kit: kit.name)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A fresh backend over the tiny pair."""
    kit: SamplingKit = request.param
    return kit.open(*loop_pair(tmp_path), Options())


def answer(
    backend: Backend, sampling: SamplingParams, *, count: int = 3, reuse: int = 0
) -> tuple[int, ...]:
    """The ids of an answer of 40; ``reuse`` ids of the prompt are taken from the cache."""
    backend.configure(sampling)
    backend.rewind(reuse)
    *_, last = generate(
        backend,
        PROMPT,
        sampling,
        width=FixedWidth(count),
        reader=ReplyText(lambda ids: "x" * len(ids), ()),
        stop_ids=frozenset(),
    )
    assert isinstance(last, Done)
    return last.tokens


def settings(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=40, **fields)


def test_a_seed_gives_the_same_text_whatever_ran_before(backend: Backend) -> None:
    first = answer(backend, settings(**WARM))
    answer(backend, settings(temperature=0.7, seed=3))
    answer(backend, settings(), count=0)
    answer(backend, settings(temperature=2.0))
    assert answer(backend, settings(**WARM)) == first
    assert answer(backend, settings(**WARM), reuse=5) == first
    assert answer(backend, settings(temperature=1.0, seed=12)) != first


def test_a_fresh_backend_gives_the_same_text(backend: Backend, tmp_path: Path) -> None:
    for kit in sampling_kits():
        if kit.name == backend.info.backend:
            other = kit.open(*loop_pair(tmp_path / "other"), Options())
            assert answer(other, settings(**WARM)) == answer(backend, settings(**WARM))


def test_no_seed_gives_another_text_each_time(backend: Backend) -> None:
    texts = {answer(backend, settings(temperature=1.0)) for _ in range(4)}
    assert len(texts) == 4


@pytest.mark.parametrize("limit", [{"top_p": 0.0}, {"top_k": 1}, {"temperature": 0.0}])
def test_no_choice_is_plain_greedy(backend: Backend, limit: dict[str, Any]) -> None:
    truth = plain(backend, PROMPT, 40)
    for count in (0, 3):
        assert list(answer(backend, settings(**{**WARM, **limit}), count=count)) == truth


@pytest.mark.parametrize(
    "limit", [{"top_p": 1e-5}, {"temperature": 1e-5}, {"min_p": 1.0}], ids=lambda limit: str(limit)
)
def test_almost_no_choice_is_plain_greedy(backend: Backend, limit: dict[str, Any]) -> None:
    truth = plain(backend, PROMPT, 40)
    assert list(answer(backend, settings(**{**WARM, **limit}))) == truth


PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4},
]


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_penalties_act_inside_a_block_as_step_by_step(
    backend: Backend, penalty: dict[str, float]
) -> None:
    greedy = answer(backend, settings(), count=0)
    truth = answer(backend, settings(**penalty), count=0)
    assert truth != greedy, "the penalty must change this answer"
    for count in (1, 2, 3):
        assert answer(backend, settings(**penalty), count=count) == truth
    answer(backend, settings(frequency_penalty=-1.0))
    assert answer(backend, settings(**penalty), reuse=6) == truth
    assert answer(backend, settings()) == greedy


def test_penalties_count_each_token_once(backend: Backend) -> None:
    """A frequency penalty that outweighs every score gap lets no id come twice before all came."""
    backend.configure(settings(frequency_penalty=100.0))
    ids = answer(backend, settings(frequency_penalty=100.0))
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("kit", sampling_kits(), ids=lambda kit: kit.name)
@pytest.mark.parametrize("make", [loop_pair, v2_pair])
def test_drafts_leave_the_distribution_alone(
    kit: SamplingKit, make: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    """Two tokens behind a fixed history: drafted against plain, 400 answers each."""
    backend = kit.open(*make(tmp_path), Options())
    sampling = settings(temperature=1.0, top_k=3, seed=8)
    backend.configure(sampling)
    backend.rewind(0)
    backend.extend(PROMPT)
    pending = backend.sample()

    def seen(count: int) -> Counter[tuple[int, ...]]:
        pairs: Counter[tuple[int, ...]] = Counter()
        for _ in range(400):
            backend.rewind(len(PROMPT))
            tokens: tuple[int, ...] = ()
            last = pending
            while len(tokens) < 2:
                verdict = backend.verify(backend.propose(last, count))
                backend.commit(verdict.accepted + 1)
                tokens += verdict.tokens
                last = tokens[-1]
            pairs[tokens[:2]] += 1
        return pairs

    drafted, steps = seen(3), seen(0)
    keys = drafted.keys() | steps.keys()
    assert 5 <= len(keys) <= 9
    cells = [(drafted[k], steps[k]) for k in keys if drafted[k] + steps[k] >= 10]
    chi = sum((a - b) ** 2 / (a + b) for a, b in cells)
    assert chi < 30  # 8 degrees of freedom: by chance once in 5,000


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": (WARM, {"temperature": 0.3}),
    "top_p": (WARM, {"top_p": 0.3}),
    "top_k": (WARM, {"top_k": 2}),
    "min_p": (WARM, {"min_p": 0.5}),
    "seed": (WARM, {"seed": 12}),
    "repetition_penalty": (WARM, {"repetition_penalty": 3.0}),
    "presence_penalty": (WARM, {"presence_penalty": 3.0}),
    "frequency_penalty": (WARM, {"frequency_penalty": 3.0}),
    "draft_temperature": (WARM, {"draft_temperature": 0.0}),
    "acceptance": (WARM, {"acceptance": "compare"}),
}
IN_THE_LOOP = {"stop", "max_tokens"}
"""Fields that the loop acts on; its own tests show that."""


def test_every_field_is_tested_here() -> None:
    # How a draft comes about changes no id.
    drafting = {"branching", "lookup"}
    assert FIELDS.keys() | IN_THE_LOOP | drafting == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_the_answer(backend: Backend, name: str) -> None:
    base, change = FIELDS[name]
    assert answer(backend, settings(**{**base, **change})) != answer(backend, settings(**base))
