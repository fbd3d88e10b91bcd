"""The path that is captured on CUDA, run here kernel by kernel at the same fixed addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.backends.torch_attention import folded_attention  # noqa: E402
from dflash_local.backends.torch_backend import TorchBackend  # noqa: E402
from dflash_local.backends.torch_config import target_config, target_shape  # noqa: E402
from dflash_local.backends.torch_draft import TorchDraft  # noqa: E402
from dflash_local.backends.torch_draft_context import ContextShape, SlicedContext  # noqa: E402
from dflash_local.backends.torch_draft_context_device import DeviceContext  # noqa: E402
from dflash_local.backends.torch_graphs import Graphs  # noqa: E402
from dflash_local.backends.torch_lean import LeanTarget  # noqa: E402
from dflash_local.backends.torch_load import open_pair  # noqa: E402
from dflash_local.backends.torch_open_target import open_target  # noqa: E402
from dflash_local.events import LoadProgress  # noqa: E402
from dflash_local.sampling import SamplingParams  # noqa: E402
from tests.support.draft_files import edit, v2_pair  # noqa: E402
from tests.support.driving import PROMPT, done, one_round, plain, run  # noqa: E402
from tests.support.kits import Options  # noqa: E402
from tests.support.random_target import save_target  # noqa: E402
from tests.support.replayed_graphs import RecordedGraph, capture_on_the_cpu  # noqa: E402
from tests.support.tiny import loop_pair  # noqa: E402

CPU = torch.device("cpu")
LONG = {"max_position_embeddings": 2048}


@pytest.mark.parametrize("window", [None, 16])
def test_both_caches_give_the_same_states(window: int | None, tmp_path: Path) -> None:
    save_target(tmp_path, "mistral", sliding_window=window)
    config = target_config(tmp_path)
    views, fixed = (
        open_target(
            tmp_path, config, target_shape(config), (0, 2), 1024, torch.float32, CPU, graphs=graphs
        )
        for graphs in (False, True)
    )
    ids = torch.randint(0, 128, (700,), generator=torch.Generator().manual_seed(2))
    at = 0
    with torch.inference_mode():
        for rows, kept in ((40, 40), (8, 3), (1, 1), (8, 8), (460, 460), (8, 8), (8, 2), (3, 3)):
            pair = []
            for target in (views, fixed):
                states = target.forward(ids[at : at + rows])
                pair.append((states.clone(), target.features().clone()))
                target.cache.advance(kept)
            for ours, theirs in zip(*pair, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            at += kept
        for target in (views, fixed):
            assert target.cache.crop(at - 5) == at - 5
        left, right = (t.forward(ids[at : at + 4]).clone() for t in (views, fixed))
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


SHAPE = ContextShape(
    windows=(None, 12, 12, 20), heads=4, kv_heads=2, head_dim=16, block=4, capacity=3000
)


def attended(context: Any, shape: ContextShape, block: tuple[Any, Any, Any], causal: bool) -> Any:
    """What block rows of every layer read out of a context."""
    query, key, value = block
    context.begin(len(key))
    out = []
    for layer, window in enumerate(shape.windows):
        keys, values = context.peek(layer, key, value)
        mask = context.mask(window, causal=causal)
        out.append(folded_attention(query[None], keys, values, mask, 0.25))
    return torch.cat(out)


@pytest.mark.parametrize("causal", [False, True])
def test_both_contexts_show_a_block_the_same_rows(causal: bool) -> None:
    generator = torch.Generator().manual_seed(5)

    def rows(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    contexts = [
        make(SHAPE, dtype=torch.float32, device=CPU) for make in (SlicedContext, DeviceContext)
    ]
    most = 0
    for step in range(250):
        # Prefills, rounds, short rewinds that every window survives, and a fresh start.
        count = 512 if step in (10, 30, 170) else 1 + step % 4
        keys, values = rows(count, 4, 2, 16), rows(count, 4, 2, 16)
        for context in contexts:
            context.begin(count)
            context.write(keys, values)
            context.advance(count)
        if step % 50 == 49:
            back = 0 if step == 149 else contexts[0].length - 37
            for context in contexts:
                context.crop(back)
        block = (rows(4, 4, 16).transpose(0, 1), rows(4, 2, 16), rows(4, 2, 16))
        ours, theirs = (attended(context, SHAPE, block, causal) for context in contexts)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        most = max(most, contexts[0].length)
    assert most > 1200
    whole = 2 * 4 * 2 * 3004 * 16 * 4
    for context in contexts:
        assert context.bytes < 0.75 * whole


def test_rows_that_a_ring_lost_are_never_seen() -> None:
    """After a long way back the device form shows no row of the text that was dropped."""
    shape = replace(SHAPE, windows=(12,))
    context = DeviceContext(shape, dtype=torch.float32, device=CPU)
    for count, text in ((512, 1.0), (512, 1.0), (200, 1.0)):
        context.begin(count)
        context.write(torch.zeros(count, 1, 2, 16), torch.full((count, 1, 2, 16), text))
        context.advance(count)
    context.crop(600)
    block = (torch.zeros(4, 4, 16), torch.zeros(4, 2, 16), torch.full((4, 2, 16), 5.0))
    assert (attended(context, shape, block, False) == 5.0).all()
    context.begin(2)
    context.write(torch.zeros(2, 1, 2, 16), torch.full((2, 1, 2, 16), 2.0))
    context.advance(2)
    torch.testing.assert_close(
        attended(context, shape, block, False), torch.full((1, 4, 4, 16), (2 * 2.0 + 4 * 5.0) / 6)
    )


def both_forms(target: Path, draft: Path, context: int = 256) -> tuple[TorchBackend, TorchBackend]:
    """The same pair at fixed addresses and over views."""
    options = Options(context=context)
    fixed, views = (
        open_pair(target, draft, options, lambda step: None, graphs=graphs)
        for graphs in (True, False)
    )
    return fixed, views


@pytest.mark.parametrize(("make", "kind"), [(v2_pair, "full"), (loop_pair, "sliding")])
def test_fixed_addresses_change_no_id(
    make: Callable[[Path], tuple[Path, Path]], kind: str, tmp_path: Path
) -> None:
    target, draft = make(tmp_path)
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 24, "is_causal": False}
    edit(draft, {**LONG, **(window if kind == "sliding" else {})}, {})
    edit(target, LONG, {})
    ours, stock = both_forms(target, draft, 1200)
    assert ours.info.kernels[-1] == "fixed addresses, kernel by kernel"
    for backend in (ours, stock):
        backend.configure(SamplingParams())
        backend.extend(PROMPT)
    truth = plain(stock, PROMPT, 300)
    ends = [done(run(backend, max_tokens=300)) for backend in (ours, stock)]
    assert ends[0].tokens == ends[1].tokens == tuple(truth)
    # The drafts are the same as well, so the acceptance is.
    assert ends[0].stats.accepted == ends[1].stats.accepted > 15
    # Plain rounds in between: their features wait, and the next verify must not reach them.
    ids = []
    for backend in (ours, stock):
        backend.rewind(0)
        backend.extend(PROMPT)
        pending, verdicts = backend.sample(), []
        for count in (0, 0, 0, 3, 3, 0, 0, 2, 0, 3, 1, 3):
            verdict = one_round(backend, pending, count)
            pending = verdict.next
            verdicts.append(verdict.drafted)
        ids.append(verdicts)
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=0.7, top_k=9, frequency_penalty=0.2, seed=4),
    ],
    ids=["sampled", "penalised", "both"],
)
def test_what_is_not_greedy_is_chosen_outside(sampling: SamplingParams, tmp_path: Path) -> None:
    seen = []
    for backend in both_forms(*loop_pair(tmp_path)):
        backend.configure(sampling)
        backend.extend(PROMPT)
        ids = [backend.sample()]
        for _ in range(20):
            ids.extend(one_round(backend, ids[-1], 3).tokens)
        seen.append(ids)
    assert seen[0] == seen[1]


def test_a_failed_capture_falls_back_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: object = None) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    begin = Graphs.__init__
    monkeypatch.setattr(
        Graphs, "__init__", lambda self, device, *, capture: begin(self, device, capture=True)
    )
    stages: list[str] = []
    target, draft = loop_pair(tmp_path)

    def note(step: LoadProgress) -> None:
        stages.append(step.stage)

    backend = open_pair(target, draft, Options(), note, graphs=True)
    words = "no CUDA graphs, kernel by kernel: operation not permitted when stream is capturing"
    assert stages[-3:] == ["capturing graphs", words, "ready"]
    assert backend.info.kernels[-1] == words
    stock = open_pair(target, draft, Options(), lambda step: None)
    assert done(run(backend)).tokens == tuple(plain(stock, PROMPT, 40))


@pytest.mark.parametrize(
    ("make", "window", "count", "branching"),
    [(loop_pair, None, 520, True), (v2_pair, 24, 300, False)],
    ids=["two buckets", "a ring that wraps"],
)
def test_replayed_rounds_give_the_same_ids(
    make: Callable[[Path], tuple[Path, Path]],
    window: int | None,
    count: int,
    branching: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No Python of a captured part runs again, also after going back."""
    target, draft = make(tmp_path)
    for folder in (target, draft):
        edit(folder, LONG, {})
    options = Options(context=1200, draft_window=window)
    stock = open_pair(target, draft, options, lambda step: None)
    truth = plain(stock, PROMPT, count)
    ends = [done(run(stock, max_tokens=count, branching=branching))]
    capture_on_the_cpu(monkeypatch)
    backend = open_pair(target, draft, options, lambda step: None, graphs=True)
    assert backend.info.kernels[-1] == "CUDA graphs"
    calls: Counter[str] = Counter()
    for owner, name in ((LeanTarget, "forward"), (TorchDraft, "hidden"), (TorchDraft, "project")):
        _count_calls(owner, name, calls, monkeypatch)
    before = RecordedGraph.replays
    ends.append(done(run(backend, max_tokens=count, branching=branching)))
    assert ends[1].tokens == ends[0].tokens == tuple(truth)
    assert ends[1].stats.accepted == ends[0].stats.accepted > 15
    # Two buckets, a few numbers of kept rows, each run once and captured once; and the prefill.
    assert max(calls.values()) < 30
    assert RecordedGraph.replays - before > 3 * ends[1].stats.rounds - 30
    assert backend.rewind(60) == 60
    backend.extend([*PROMPT, *truth][60:90])
    answer = [backend.sample()]
    while len(answer) < 40:
        answer.extend(one_round(backend, answer[-1], 3 if len(answer) % 3 else 0).tokens)
    at = 90 - len(PROMPT)
    assert answer[:40] == truth[at : at + 40]


def _count_calls(
    owner: Any, name: str, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
