"""This program's forward of the demo target beside transformers', in one process, in turn.

``make bench-forward`` runs it, on the CPU. Both read the same ids one forward after the other, so
both caches grow as they do in an answer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import transformers

from dflash_local import demo
from dflash_local.backends.torch_load import open_pair
from dflash_local.bench_setup import processor
from dflash_local.bench_view import markdown_table
from dflash_local.select import LoadOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT = 64


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--times", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    folder = demo.ensure(lambda stage, done, total: None)
    context = PROMPT + args.times * max(args.rows)
    options = LoadOptions(dtype=args.dtype, threads=args.threads, context=context)
    lean = open_pair(folder, None, options, lambda progress: None)._target
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[args.dtype], local_files_only=True
    ).eval()

    def ours(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = lean.logits(lean.forward(ids))
        lean.cache.advance(len(ids))
        return logits

    rows = []
    with torch.inference_mode():
        for count in args.rows:
            cache = transformers.DynamicCache(config=stock.config)
            lean.cache.crop(0)

            def theirs(ids: torch.Tensor, cache: transformers.DynamicCache = cache) -> torch.Tensor:
                logits: torch.Tensor = stock(input_ids=ids[None], cache=cache).logits[0]
                return logits

            prompt = torch.arange(1, 1 + PROMPT)
            ours(prompt), theirs(prompt)
            pairs = [timed(ours, theirs, 100 + i + torch.arange(count)) for i in range(args.times)]
            own, other = (1000.0 * median(side) for side in zip(*pairs, strict=True))
            rows.append((str(count), f"{own:.1f}", f"{other:.1f}", f"{other / own:.2f}"))
    print(f"{processor()}, {args.threads} thread(s), {args.dtype}, context from {PROMPT} on, ms\n")
    print(markdown_table(("rows", "lean", "transformers", "ratio"), rows))


def timed(
    ours: Callable[[torch.Tensor], torch.Tensor],
    theirs: Callable[[torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
) -> tuple[float, float]:
    """Seconds of each; in fp32 that they say the same is checked too."""
    begun = time.perf_counter()
    own = ours(ids)
    between = time.perf_counter()
    other = theirs(ids)
    ended = time.perf_counter()
    if own.dtype == torch.float32:
        assert own.argmax(-1).equal(other.argmax(-1)), "the best ids differ"
    return between - begun, ended - between


if __name__ == "__main__":
    main()
