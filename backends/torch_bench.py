"""A bench of the forwards alone, on random weights in the shapes of a published target.

``python -m dflash_local.backends.torch_bench`` needs no download: it builds the target product by
product, as loading does, and reports T(M) by graph and kernel by kernel, rounds per second with a
draft's worth of rows, and memory against the formula. On the CPU it runs a reduced size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from .torch_cache_device import DeviceCache
from .torch_embedding import Int8Embedding
from .torch_graphs import Graphs
from .torch_lean import LeanLayer, LeanTarget, LeanWeights
from .torch_quant import Quantiser
from .torch_rope import RopeTable
from .torch_target import LayerShape, Target, TargetShape


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of a target to build."""

    layers: int
    hidden: int
    middle: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SIZES = {
    "8b": Size(36, 4096, 12288, 32, 8, 128, 151_936),
    "4b": Size(36, 2560, 9728, 32, 8, 128, 151_936),
    "tiny": Size(4, 256, 512, 8, 2, 32, 2048),
}
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


def main(argv: list[str] | None = None) -> int:
    """Run it and write ``NAME.json`` and ``NAME.md``."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="torch_bench", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="8b" if cuda else "tiny")
    parser.add_argument("--quantize", choices=("nf4", "int8", "none"), default="nf4")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"), metavar="NAME")
    args = parser.parse_args(argv)
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
    quantiser = Quantiser()
    inner, cache = build(size, quantiser, scheme, context, device)
    graphs = Graphs(device, capture=cuda)
    prefix = min(512, context // 2)
    inner.forward(torch.zeros(prefix, dtype=torch.long, device=device))
    cache.advance(prefix)
    eager, replayed = {}, {}
    for rows in ROWS:
        ids = torch.arange(rows, device=device)
        eager[rows] = timed(partial(step, inner, ids), repeat, cuda)
        key = ("verify", rows, cache.bucket_for(rows))
        replayed[rows] = timed(partial(graphs.run, key, partial(step, inner), ids), repeat, cuda)
    weights = (
        size.layers
        * size.hidden
        * ((2 * size.heads + 2 * size.kv_heads) * size.head_dim + 3 * size.middle)
        + size.vocab * size.hidden
    )
    return {
        "shape": asdict(size),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "scheme": scheme,
        "eager_ms": eager,
        "graph_ms": replayed,
        "graphs": graphs.captured,
        "capture_failure": graphs.failure,
        "plain_per_s": 1000.0 / replayed[1],
        "verify8_per_s": 1000.0 / replayed[8],
        "quantised_weights": weights,
        "bytes_per_quantised_weight": quantiser.quantised_bytes
        / max(1, quantiser.quantised_weights),
        "weight_bytes": inner.bytes(),
        "cache_bytes": cache.bytes,
        "cache_formula_bytes": 4 * size.layers * size.kv_heads * size.head_dim * context,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "not_quantised": quantiser.refused,
    }


def build(
    size: Size, quantiser: Quantiser, scheme: str, context: int, device: torch.device
) -> tuple[LeanTarget, DeviceCache]:
    """A random target, never more than one product of it in 16 bits."""
    make = quantiser.maker(scheme)
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16

    def random(outputs: int, columns: int) -> torch.Tensor:
        weight = torch.empty(outputs, columns, dtype=dtype, device=device)
        return weight.normal_(0.0, columns**-0.5, generator=generator)

    ones = torch.ones(size.hidden, dtype=dtype, device=device)
    head_ones = torch.ones(size.head_dim, dtype=dtype, device=device)
    wide, narrow = size.heads * size.head_dim, size.kv_heads * size.head_dim
    layers = [
        LeanLayer(
            input_norm=ones,
            qkv=make(f"layers.{i}.qkv", random(wide + 2 * narrow, size.hidden)),
            q_norm=head_ones,
            k_norm=head_ones,
            out=make(f"layers.{i}.out", random(size.hidden, wide)),
            post_norm=ones,
            gate_up=make(f"layers.{i}.gate_up", random(2 * size.middle, size.hidden)),
            down=make(f"layers.{i}.down", random(size.hidden, size.middle)),
        )
        for i in range(size.layers)
    ]
    embedding = Int8Embedding(random(size.vocab, size.hidden))
    head = make("head", random(size.vocab, size.hidden))
    weights = LeanWeights(embedding, layers, ones, head, tied=False, eps=1e-6)
    numbers = LayerShape("full_attention", None, size.heads, size.kv_heads, size.head_dim)
    shape = TargetShape(size.hidden, (numbers,) * size.layers, size.vocab, size.vocab)
    cache = DeviceCache(shape.layers, context, dtype=dtype, device=device)
    exponents = torch.arange(0, size.head_dim, 2, dtype=torch.float) / size.head_dim
    rope = RopeTable(1e6**-exponents, 1.0, context, dtype=dtype, device=device)
    return LeanTarget(weights, shape, (), cache, rope), cache


def step(target: Target, ids: torch.Tensor) -> tuple[torch.Tensor]:
    """One verify without its decision."""
    return (target.logits(target.forward(ids)),)


def timed(run: Callable[[], object], repeat: int, cuda: bool) -> float:
    """Median time of one run in milliseconds, after three for warmth."""
    times = []
    for index in range(repeat + 3):
        begun = perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        if index >= 3:
            times.append(1000.0 * (perf_counter() - begun))
    return median(times)


def as_markdown(report: dict[str, object]) -> str:
    """The report for a person."""
    eager, graph = report["eager_ms"], report["graph_ms"]
    assert isinstance(eager, dict)
    assert isinstance(graph, dict)
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
    ]
    lines += [
        f"- {name.replace('_', ' ')}: {value}"
        for name, value in report.items()
        if not name.endswith("_ms") and name != "shape"
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
