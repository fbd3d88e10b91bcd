"""A bench of the forwards alone, on random weights in the shapes of a published target.

``python -m dflash_local.backends.torch_bench`` needs no download: it builds the target product by
product, as loading does, with a draft, and reports T(M) by graph and kernel by kernel, plain and
speculative rounds per second, and memory against the formula. On the CPU it runs a reduced size.
``--pair NAME`` measures a pair that is here instead, in fp32, bf16 and NF4 side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from dflash_local.sampling import SamplingParams

from . import torch_bench_pair
from .torch_backend import TorchBackend
from .torch_graphs import Graphs
from .torch_lean import LeanTarget
from .torch_quant import Quantiser
from .torch_random_pair import SIZES, Size, random_backend, random_draft, random_target

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
BLOCKS = (1, 4, 8, 16)
"""Rows of the whole rounds; 1 is a plain step."""
TREES = (*BLOCKS[1:], 32)
"""The same where the draft branches, up to twice the block."""
KEPT = 4
"""Rows that a drafting round keeps, which is what a good draft reaches."""
WARM = 3


def main(argv: list[str] | None = None) -> int:
    """Run it and write ``NAME.json`` and ``NAME.md``."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="torch_bench", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="8b" if cuda else "tiny")
    parser.add_argument("--quantize", choices=("nf4", "int8", "none"), default="nf4")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"), metavar="NAME")
    parser.add_argument("--pair", metavar="NAME", help="a pair of dflash-local list instead")
    parser.add_argument("--prompts", type=int, default=3, help="with --pair")
    parser.add_argument("--max-tokens", type=int, default=128, help="with --pair")
    args = parser.parse_args(argv)
    if args.pair is not None:
        sys.stdout.write(torch_bench_pair.table(args.pair, args.prompts, args.max_tokens))
        return 0
    if not cuda:
        torch.set_num_threads(1)
    with torch.inference_mode():
        report = measure(SIZES[args.size], args.quantize, args.context, args.repeat)
    report["size"] = args.size
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    text = as_markdown(report)
    args.out.with_suffix(".md").write_text(text)
    sys.stdout.write(text)
    return 0


def measure(size: Size, scheme: str, context: int, repeat: int) -> dict[str, object]:
    """Times in milliseconds and sizes in bytes."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    body, drafting = Quantiser(), Quantiser()
    target, cache = random_target(size, body, scheme, context, device)
    draft = random_draft(size, target, drafting, scheme, context)
    graphs = Graphs(device, capture=cuda)
    backend = random_backend(size, target, draft, scheme, context, graphs)
    prefix = context // 4
    backend.extend(range(prefix))
    eager, replayed = {}, {}
    for rows in ROWS:
        ids = torch.arange(rows, device=device)
        eager[rows] = timed(partial(step, target, ids), repeat, cuda)
        key = ("forward", rows, cache.bucket_for(rows))
        replayed[rows] = timed(partial(graphs.run, key, partial(step, target), ids), repeat, cuda)

    def round_ms(rows: int, *, branching: bool) -> float:
        backend.configure(SamplingParams(branching=branching))
        backend.rewind(prefix)
        # As many rounds as the context has room for.
        most = min(repeat, (context - prefix - rows) // min(KEPT, rows) - WARM)
        return timed(partial(one_round, backend, rows), most, cuda)

    rounds = {rows: round_ms(rows, branching=False) for rows in BLOCKS}
    trees = {rows: round_ms(rows, branching=True) for rows in TREES}
    return {
        "shape": asdict(size),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "scheme": scheme,
        "eager_ms": eager,
        "graph_ms": replayed,
        "round_ms": rounds,
        "tree_round_ms": trees,
        "graphs": graphs.captured,
        "capture_failure": graphs.failure,
        "plain_rounds_per_s": 1000.0 / rounds[1],
        "speculative_rounds_per_s": {rows: 1000.0 / rounds[rows] for rows in BLOCKS[1:]},
        "quantised_weights": size.quantised,
        "bytes_per_quantised_weight": body.quantised_bytes / max(1, body.quantised_weights),
        "weight_bytes": target.bytes(),
        "draft_bytes": draft.bytes,
        "cache_bytes": cache.bytes,
        "cache_formula_bytes": 4 * size.layers * size.kv_heads * size.head_dim * context,
        "draft_cache_bytes": draft.context.bytes,
        "draft_cache_formula_bytes": 4
        * size.draft_layers
        * size.kv_heads
        * size.head_dim
        * (context + size.draft.block_size),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "not_quantised": body.refused + drafting.refused,
    }


def one_round(backend: TorchBackend, rows: int) -> None:
    """Draft, verify, keep: a whole round with its host read; one row is a plain step."""
    backend.verify(backend.propose(1, rows - 1))
    backend.commit(min(KEPT, rows))


def step(target: LeanTarget, ids: torch.Tensor) -> tuple[torch.Tensor]:
    """One verify without its decision."""
    return (target.logits(target.forward(ids)),)


def timed(run: Callable[[], object], repeat: int, cuda: bool) -> float:
    """Median time of one run in milliseconds, after some for warmth."""
    times = []
    for index in range(repeat + WARM):
        begun = perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        if index >= WARM:
            times.append(1000.0 * (perf_counter() - begun))
    return median(times)


def as_markdown(report: dict[str, object]) -> str:
    """The report for a person."""
    kinds = ("eager", "graph", "round", "tree_round")
    eager, graph, rounds, trees = (_times(report[f"{kind}_ms"]) for kind in kinds)
    paths_and_trees = [
        *((f"{rows}", ms) for rows, ms in rounds.items()),
        *((f"{rows}, a tree", ms) for rows, ms in trees.items()),
    ]
    lines = [
        f"{report['size']} · {report['scheme']} · {report['device']} · torch {report['torch']}",
        "",
        "| M | eager ms | graph ms | graph T(M)/T(1) |",
        "|---|---|---|---|",
        *(
            f"| {rows} | {eager[rows]:.2f} | {graph[rows]:.2f} | {graph[rows] / graph[1]:.2f} |"
            for rows in eager
        ),
        "",
        "| rows of a round, draft included | ms | rounds per s | tokens a round that equal plain |",
        "|---|---|---|---|",
        *(
            f"| {rows} | {ms:.2f} | {1000.0 / ms:.1f} | {ms / rounds[1]:.2f} |"
            for rows, ms in paths_and_trees
        ),
        "",
    ]
    lines += [
        f"- {name.replace('_', ' ')}: {value}"
        for name, value in report.items()
        if not name.endswith("_ms") and not isinstance(value, dict)
    ]
    return "\n".join(lines) + "\n"


def _times(values: object) -> dict[int, float]:
    assert isinstance(values, dict)
    return values


if __name__ == "__main__":
    sys.exit(main())
