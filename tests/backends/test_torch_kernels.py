"""bitsandbytes' rule, replayed for cards that are not here."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from dflash_local.backends.torch_kernels import as_table, replay
from dflash_local.errors import OptionError


def test_eight_rows_are_fused_on_every_card() -> None:
    assert all(row.slow_share == 0 for row in replay(("4b", "8b", "27b"), (1, 8)))


def test_sixteen_rows_fall_back_where_the_card_is_large() -> None:
    shares = {(r.target, r.card): r.slow_share for r in replay(("4b", "8b", "27b"), (16,))}
    assert shares["8b", "3090"] == shares["8b", "4070 Ti S"] == shares["27b", "3090"] == 0
    assert shares["4b", "4090"] == pytest.approx(0.51, abs=0.01)
    assert shares["8b", "4090"] > 0
    assert shares["8b", "5080"] == pytest.approx(0.35, abs=0.01)
    assert shares["27b", "4090"] == shares["27b", "5090"] == pytest.approx(0.08, abs=0.01)


def test_the_table_has_a_line_per_card() -> None:
    assert len(as_table(replay(("8b",))).splitlines()) == 10


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(OptionError):
        replay(("9b",))
