"""The benches of the torch backend run in their reduced sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from dflash_local import demo
from dflash_local.backends.torch_bench import main
from dflash_local.free_memory import cpu_bf16


def test_the_reduced_bench_writes_both_reports(tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert main(["--size", "tiny", "--repeat", "1", "--context", "256", "--out", str(out)]) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["bytes_per_quantised_weight"] <= 0.6
    assert report["cache_bytes"] == report["cache_formula_bytes"]
    assert report["draft_cache_bytes"] == report["draft_cache_formula_bytes"]
    assert report["plain_rounds_per_s"] > 0
    assert set(report["speculative_rounds_per_s"]) == {"4", "8", "16"}
    text = out.with_suffix(".md").read_text()
    assert set(report["tree_round_ms"]) == {"4", "8", "16", "32"}
    assert "| 16 |" in text
    assert "| 32, a tree |" in text
    assert "draft included" in text


@pytest.mark.slow
@pytest.mark.skipif(not cpu_bf16(), reason="bf16 is emulated on this CPU and takes minutes")
def test_a_pair_is_measured_in_every_way_of_storing_it(capsys: pytest.CaptureFixture[str]) -> None:
    if demo.installed() is None:
        pytest.skip("the demo pair is not here")
    assert main(["--pair", "demo", "--prompts", "1", "--max-tokens", "8"]) == 0
    table = capsys.readouterr().out
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| fp32", "| bf16", "| NF4 body, head and draft"]
    sizes = [int(row[5]) for row in rows]
    assert sizes[0] > sizes[1] > sizes[2]
