"""What a new draft looks like for a target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_local.draft_config import parse_draft_config
from dflash_local.errors import DraftMismatch, OptionError
from dflash_local.training.draft import check, mask_id, settings, start, tap_layers
from dflash_local.training.recipe import FitRecipe
from dflash_local.training.teacher import Teacher
from tests.backends.test_families import FAMILIES
from tests.support.random_target import save_target


def test_taps_follow_the_published_rule() -> None:
    assert tap_layers(36, 5) == (1, 9, 17, 25, 33)
    assert tap_layers(30, 5) == (1, 8, 14, 20, 27)
    assert tap_layers(12, 1) == (6,)
    for layers in range(1, 12):
        for taps in range(1, 8):
            chosen = tap_layers(layers, taps)
            assert chosen
            assert set(chosen) <= set(range(layers))


def test_the_mask_is_an_id_that_no_text_has() -> None:
    unused = torch.tensor([False, True, False, True, True, False])
    assert mask_id(unused, [0, 2, 3], 6) == 3
    assert mask_id(unused, [0, 2], 6) == 4
    assert mask_id(torch.zeros(6, dtype=torch.bool), [0], 8) == 7


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [{}, {"v2": True}, {"selector": True}], ids=str)
def test_every_family_gets_a_draft_that_fits_it(
    family: str, kind: dict[str, bool], tmp_path: Path
) -> None:
    model, own = FAMILIES[family]
    save_target(tmp_path, model, **own)
    teacher = Teacher(tmp_path, (0, 2), torch.device("cpu"), torch.float32)
    fit = FitRecipe(layers=2, **kind)
    raw = settings(teacher.config, fit, teacher.taps, 5, 512)
    config = parse_draft_config(raw)
    config.check_target(hidden_size=64, layers=3, embedding_rows=128)
    network, _ = start(fit, raw, teacher, 64)
    anchors = torch.tensor([[3, 7]])
    states = network(torch.randn(1, 9, 128), anchors, torch.randn(1, 2, 4, 64))
    assert states.shape == (1, 2, 4, 64)
    assert bool(states.isfinite().all())


def test_a_draft_of_other_numbers_is_no_start(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    teacher = Teacher(tmp_path, (0, 2), torch.device("cpu"), torch.float32)

    def begin(fit: FitRecipe, taps: tuple[int, ...] = (0, 2)) -> None:
        start(fit, settings(teacher.config, fit, taps, 5, 512), teacher, 64)

    with pytest.raises(OptionError, match="no folder with a draft"):
        begin(FitRecipe(init=str(tmp_path / "nowhere")))
    with pytest.raises(DraftMismatch):
        begin(FitRecipe(init=str(Path(__file__).parents[1] / "data" / "dflash_tiny")))
    for fit, told in (
        (FitRecipe(block=4, short_block=6), "short"),
        (FitRecipe(draft_vocab=129), "the target has 128"),
        (FitRecipe(init="nowhere"), "no folder with a draft"),
    ):
        with pytest.raises(OptionError, match=told):
            check(fit, 64, 3, 128, (0, 2))
    with pytest.raises(OptionError, match="16 divides"):
        check(FitRecipe(v2=True), 40, 3, 128, (0, 2))
