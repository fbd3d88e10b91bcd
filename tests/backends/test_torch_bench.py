"""The bench of the forwards alone runs in its reduced size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from dflash_local.backends.torch_bench import main


def test_the_reduced_bench_writes_both_reports(tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert main(["--size", "tiny", "--repeat", "1", "--context", "64", "--out", str(out)]) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["bytes_per_quantised_weight"] <= 0.6
    assert report["cache_bytes"] == report["cache_formula_bytes"]
    assert "| 16 |" in out.with_suffix(".md").read_text()
