"""SamplingParams refuses what it cannot mean."""

from __future__ import annotations

import pytest

from dflash_local.errors import OptionError
from dflash_local.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2.5),
        ("max_tokens", "3"),
        ("top_k", 1.5),
        ("seed", 1.5),
        ("seed", True),
        ("temperature", None),
        ("temperature", "1"),
        ("stop", (1,)),
        ("stop", None),
    ],
)
def test_settings_of_another_kind_are_refused(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-38, 1e-300, 1e-6])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy
