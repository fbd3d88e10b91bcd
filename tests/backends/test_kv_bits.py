"""The target's K/V in 8 bits: how far off, how small, and as croppable as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local import fit  # noqa: E402
from dflash_local.backends.torch_config import target_config, target_shape  # noqa: E402
from dflash_local.backends.torch_kv_rows import Int8Rows, PlainRows  # noqa: E402
from dflash_local.backends.torch_load import open_pair  # noqa: E402
from dflash_local.backends.torch_open_target import open_target  # noqa: E402
from tests.support.driving import PROMPT, done, plain, run  # noqa: E402
from tests.support.kits import Options  # noqa: E402
from tests.support.random_target import save_target  # noqa: E402
from tests.support.tiny import loop_pair  # noqa: E402

CPU = torch.device("cpu")
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_row_is_within_half_a_step(dtype: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 2, 40, 64, generator=generator).to(dtype) for _ in range(2)]
    rows[0][0, 0, 3] = 0.0
    rows[1] *= torch.logspace(-3, 3, 40)[:, None].to(dtype)
    store = Int8Rows((1, 2, 50, 64), dtype, CPU, cleared=False)
    store.write(slice(5, 45), *rows)
    for exact, read in zip(rows, store.read(slice(5, 45)), strict=True):
        assert read.dtype == dtype
        step = exact.float().abs().amax(dim=-1, keepdim=True) / 127
        # Half a step, and what the scale and the product lose in bf16.
        slack = 0.51 if dtype == torch.float32 else 1.1
        assert ((read - exact).float().abs() <= slack * step + 1e-8).all()


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3", {}), ("llama", {}), ("mistral", {"sliding_window": 16}), ("gemma3_text", WINDOWS)],
)
@pytest.mark.parametrize("graphs", [False, True], ids=["views", "fixed"])
def test_logits_move_little(
    family: str, settings: dict[str, Any], graphs: bool, tmp_path: Path
) -> None:
    save_target(tmp_path, family, **settings)
    config = target_config(tmp_path)
    ids = torch.randint(0, 128, (400,), generator=torch.Generator().manual_seed(1))
    logits, sizes = [], []
    for rows in (PlainRows, Int8Rows):
        target = open_target(
            tmp_path,
            config,
            target_shape(config),
            (),
            512,
            torch.float32,
            CPU,
            rows=rows,
            graphs=graphs,
        )
        parts = []
        with torch.inference_mode():
            for start, count in ((0, 300), *((at, 1) for at in range(300, 400))):
                parts.append(target.logits(target.forward(ids[start : start + count])))
                target.cache.advance(count)
        logits.append(torch.cat(parts))
        sizes.append(target.cache.bytes)
    exact, rounded = logits
    off = ((rounded - exact).norm() / exact.norm()).item()
    agreement = (rounded.argmax(-1) == exact.argmax(-1)).float().mean().item()
    print(f"{family}: relative error {off:.4f}, same argmax {agreement:.3f}")
    assert 0 < off < 0.02
    assert agreement > 0.97
    assert sizes[1] == pytest.approx(sizes[0] * (1 + 4 / 16) / 4, rel=0.01)


@pytest.mark.parametrize("graphs", [False, True], ids=["views", "fixed"])
def test_drafting_changes_no_id(graphs: bool, tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path)
    backend = open_pair(target, draft, Options(kv_bits=8), lambda step: None, graphs=graphs)
    assert "K/V in 8 bits" in backend.info.kernels
    options: dict[str, Any] = {"backend": "torch", "dtype": "fp32", "context": 256, "kv_bits": 8}
    need = fit.fit(target, draft, **options).need
    # A CPU reads K/V in steps of 64 rows; of 264 that is a fifth more.
    assert backend.memory().cache <= need.cache + need.draft_cache <= 1.2 * backend.memory().cache
    truth = plain(backend, PROMPT, 200)
    end = done(run(backend, max_tokens=200))
    assert end.tokens == tuple(truth)
    assert end.stats.accepted > 20
    assert backend.rewind(100) == 100
    backend.extend([*PROMPT, *truth][100:150])
    assert backend.sample() == truth[150 - len(PROMPT)]
