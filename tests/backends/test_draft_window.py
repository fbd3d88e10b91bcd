"""A draft that sees only the last positions: bounded, exact, and the same as one trained so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_local import fit
from dflash_local.backend import Backend
from dflash_local.errors import OptionError
from tests.support.driving import PROMPT, check_coverage, done, one_round, plain, run
from tests.support.kits import Kit, Options
from tests.support.tiny import loop_pair

WINDOW = 24
LONG = {"max_position_embeddings": 4096}
SLIDING = {
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "is_causal": False,
}
MIXED = {**SLIDING, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 12}


def opened(
    kit: Kit, folder: Path, *, draft: dict[str, Any] | None = None, **options: Any
) -> Backend:
    pair = loop_pair(folder, LONG, {**LONG, **(draft or {})})
    return kit.open(pair[0], pair[1], Options(**{"context": 2048, **options}))


def proposals(backend: Backend, prompt: tuple[int, ...], rounds: int) -> list[tuple[int, ...]]:
    backend.extend(prompt)
    pending, drafted = backend.sample(), []
    for index in range(rounds):
        verdict = one_round(backend, pending, 3 if index % 7 else 0)
        pending = verdict.next
        drafted.append(verdict.drafted)
    return drafted


@pytest.mark.parametrize(
    ("trained", "asked"),
    [({}, SLIDING), (MIXED, {**MIXED, "sliding_window": 12})],
    ids=["full", "mixed"],
)
def test_it_proposes_what_a_draft_trained_with_that_window_does(
    kit: Kit, trained: dict[str, Any], asked: dict[str, Any], tmp_path: Path
) -> None:
    window = WINDOW if not trained else 12
    limited = opened(kit, tmp_path / "limited", draft=trained, draft_window=window)
    same = {**asked, "layer_types": ["sliding_attention"] * 2}
    declared = opened(kit, tmp_path / "declared", draft=same)
    free = opened(kit, tmp_path / "free", draft=trained)
    ours, theirs, unlimited = (proposals(b, PROMPT * 4, 40) for b in (limited, declared, free))
    assert ours == theirs
    assert ours != unlimited, "the window must matter"


def test_the_ids_are_the_targets(kit: Kit, tmp_path: Path) -> None:
    backend = opened(kit, tmp_path, draft_window=WINDOW)
    # Costs that are remembered belong to what is named here.
    assert f"draft window {WINDOW}" in backend.info.kernels
    truth = plain(backend, PROMPT, 200)
    end = done(run(backend, max_tokens=200))
    assert end.tokens == tuple(truth)
    assert end.stats.accepted > 20


@pytest.mark.parametrize("how", ["limited", "trained so"])
def test_the_context_is_bounded(kit: Kit, how: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"draft_window": WINDOW} if how == "limited" else {}
    draft = None if how == "limited" else SLIDING
    backend = opened(kit, tmp_path, draft=draft, **options)
    alone = kit.open(tmp_path / "target", None, Options(context=2048))
    row = 2 * 2 * 2 * 16 * 4
    sizes = []
    for _ in range(6):
        for each in (backend, alone):
            each.extend([(7 * i) % 128 for i in range(300)])
        pending = backend.sample()
        one_round(backend, pending, 3, keep=1)
        alone.extend((pending,))
        sizes.append(backend.memory().cache - alone.memory().cache)
    # What is seen, a margin to go back by, and room for a slice.
    assert max(sizes) <= row * (WINDOW + 768 + 256)
    assert sizes[-1] == sizes[-2] == sizes[-3]
    options["context"] = 2048
    need = fit.fit(
        tmp_path / "target", tmp_path / "draft", backend=kit.name, dtype="fp32", **options
    ).need
    assert max(sizes) <= need.draft_cache <= row * (WINDOW + 1024 + 256)


def test_going_back_a_little_leaves_nothing_behind(kit: Kit, tmp_path: Path) -> None:
    ids = [(11 * i * i + 3 * i) % 128 for i in range(900)]
    used, fresh = (
        opened(kit, tmp_path, draft_window=WINDOW),
        opened(kit, tmp_path, draft_window=WINDOW),
    )
    for start in range(0, 900, 300):
        used.extend(ids[start : start + 300])
    assert used.rewind(800) == 800
    for start in range(0, 800, 400):
        fresh.extend(ids[start : start + 400])
    for backend in (used, fresh):
        check_coverage(backend)
    assert proposals(used, PROMPT, 12) == proposals(fresh, PROMPT, 12)


def test_going_back_far_costs_no_id(kit: Kit, tmp_path: Path) -> None:
    ids = [(11 * i * i + 3 * i) % 128 for i in range(1500)]
    backend = opened(kit, tmp_path, draft_window=WINDOW)
    for start in range(0, 1500, 300):
        backend.extend(ids[start : start + 300])
    assert backend.rewind(40) == 40
    backend.extend(PROMPT)
    answer = [backend.sample()]
    while len(answer) < 60:
        answer.extend(one_round(backend, answer[-1], 3).tokens)
    assert answer[:60] == plain(backend, (*ids[:40], *PROMPT), 60)


def test_a_window_below_the_block_is_refused(kit: Kit, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="smaller than the draft's block of 4 rows"):
        opened(kit, tmp_path, draft_window=3)
