"""Many sequences at once say what each says alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dflash_local.bench import loops
from dflash_local.training.rows import _attend
from dflash_local.training.teacher import Teacher
from dflash_local.training.writer import _LOOK, _LOOP, BEST, Written, _draw, write
from tests.backends.test_families import FAMILIES
from tests.support.random_target import save_target

PROMPTS = [[5, 9, 11], [7], [3, 4, 8, 2, 1, 60, 22], [5, 6], [99, 98, 97, 96], [31]]


@pytest.fixture
def teacher(target: Path) -> Teacher:
    return Teacher(target, (0, 2), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_what_transformers_generates_alone(family: str, tmp_path: Path) -> None:
    kind, settings = FAMILIES[family]
    save_target(tmp_path, kind, **settings)
    teacher = Teacher(tmp_path, (0, 2), torch.device("cpu"), torch.float32)

    def written_with(stops: frozenset[int]) -> list[Written]:
        heats = [0.0] * len(PROMPTS)
        rows: list[Written] = write(
            teacher, PROMPTS, most=24, stop_ids=stops, temperatures=heats, seed=0, tap=True
        )
        return rows

    # Ids that end some rows early, so that rows leave the batch.
    free = written_with(frozenset())
    stops = frozenset((free[0].ids[len(PROMPTS[0]) + 2], free[3].ids[len(PROMPTS[3]) + 9]))
    written = written_with(stops)
    lengths = set()
    for prompt, row in zip(PROMPTS, written, strict=True):
        alone = teacher.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=sorted(stops),
            pad_token_id=0,
        )[0].tolist()
        assert row.ids == alone
        assert row.finished == (row.ids[-1] in stops)
        lengths.add(len(alone) - len(prompt))
        answer = row.ids[row.prompt_length :]
        assert row.best_ids[:, 0].tolist() == answer
        logits = teacher.model(torch.tensor([row.ids])).logits[0, row.prompt_length - 1 : -1]
        best = logits.softmax(-1).topk(BEST, dim=-1)
        torch.testing.assert_close(
            row.best_probabilities.float(), best.values, atol=2e-3, rtol=1e-2
        )
        assert row.features is not None
        expected = teacher.features(torch.tensor([row.ids]))[0, :-1]
        torch.testing.assert_close(row.features[:-1].float(), expected, atol=2e-2, rtol=2e-2)
    assert len(lengths) > 1, "no row left early, so leaving was not tested"


def test_attention_of_one_row_is_the_fused_kernels(teacher: Teacher) -> None:
    assert teacher.whole_columns, "the writer would not use it"
    draws = torch.Generator().manual_seed(2)
    query = torch.randn(5, 6, 1, 16, generator=draws)
    key, value = (torch.randn(5, 2, 33, 16, generator=draws) for _ in range(2))
    visible = torch.rand(5, 1, 1, 33, generator=draws) < 0.7
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    for mask in (None, visible):
        for scaling in (None, 0.3):
            mine, _ = _attend(module, query, key, value, mask, scaling=scaling)
            theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
            torch.testing.assert_close(mine, theirs)


def test_draws_follow_the_seed_and_the_temperature(teacher: Teacher) -> None:
    def rows(seed: int, heat: float, top_p: float = 1.0) -> list[list[int]]:
        written = write(
            teacher,
            [[5, 9]] * 6,
            most=8,
            stop_ids=frozenset(),
            temperatures=[heat] * 5 + [0.0],
            seed=seed,
            top_p=top_p,
        )
        return [row.ids for row in written]

    assert rows(1, 1.5) == rows(1, 1.5)
    assert rows(1, 1.5) != rows(2, 1.5)
    greedy = rows(1, 0.0)
    assert all(row == greedy[0] for row in greedy)
    assert rows(1, 1.5)[-1] == greedy[0], "the greedy row of a mixed batch stays greedy"
    assert rows(3, 1.5, top_p=1e-6) == greedy


def test_a_row_that_repeats_itself_ends_there_and_leaves_the_others_alone(teacher: Teacher) -> None:
    most, told = 120, list[str]()
    written = write(
        teacher,
        PROMPTS,
        most=most,
        stop_ids=frozenset(),
        temperatures=[0.0] * 6,
        seed=0,
        tap=True,
        tell=told.append,
    )
    ends = []
    for prompt, row in zip(PROMPTS, written, strict=True):
        alone = teacher.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        looks = [n for n in range(_LOOP, most, _LOOK) if loops(alone[:n], _LOOP)]
        ends.append(looks[0] if looks else most)
        assert row.ids[len(prompt) :] == alone[: ends[-1]]
        assert len(row.best_ids) == ends[-1]
        assert not row.finished
        assert row.features is not None
        assert len(row.features) == len(row.ids)
    assert told == [f"the next ones: token {n} of {most}" for n in range(1, max(ends) + 1)]
    assert min(ends) < most, "no row repeats itself, so nothing was tested"


@pytest.mark.parametrize(("top_p", "allowed"), [(1.0, 4), (0.75, 2)])
def test_draws_have_the_targets_chances(top_p: float, allowed: int) -> None:
    chances = torch.tensor([0.0, 0.5, 0.05, 0.3, 0.15])
    rows = 20_000
    logits = (chances.log() * 0.7).expand(rows, -1)  # a temperature of 0.7 takes it back
    draws = torch.Generator().manual_seed(4)
    drawn = _draw(logits, torch.full((rows,), 0.7), top_p, draws)
    kept = torch.where(chances >= chances.sort().values[-allowed], chances, 0.0)
    shares = torch.bincount(drawn, minlength=5) / rows
    torch.testing.assert_close(shares, kept / kept.sum(), atol=0.015, rtol=0.0)
    assert (shares[kept == 0.0] == 0.0).all()


def test_the_coldest_draw_is_the_best_id() -> None:
    logits = torch.tensor([[1.0, 3.0, float("-inf"), 2.9]])
    for heat in (1e-3, 1e-20, 1e-38, 1e-45):
        drawn = _draw(logits, torch.tensor([heat]), 0.95, torch.Generator().manual_seed(1))
        assert drawn.tolist() == [1]
