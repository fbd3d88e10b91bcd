"""This program in NF4 and llama.cpp in Q4_1 on the demo pair, in turn, on the CPU.

``make bench-llama`` runs it. llama.cpp is compiled into an environment of its own (minutes), which
takes a C++ compiler.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dflash_local import demo
from dflash_local.bench_prompts import SETS, chosen, prompts_hash
from dflash_local.bench_setup import processor
from dflash_local.bench_view import markdown_table
from dflash_local.tokenizer import HubTokenizer

from .bench_peers import Side, environment, in_turn, start

PEER = "llama-cpp-python==0.3.36"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--set", default="all", choices=tuple(SETS))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--venv", type=Path, default=Path("build/llama"))
    args = parser.parse_args()
    python = environment(args.venv.absolute(), [PEER])
    target, threads = demo.ensure(lambda stage, done, total: None), str(args.threads)
    peer = start(str(python), "peer_llama.py", str(target / demo.SOURCE_NAME), threads)
    pair = (str(target), str(demo.draft_folder()), "nf4", threads)
    ours = start(sys.executable, "peer_ours.py", *pair)
    sides = [
        Side("llama.cpp, Q4_1, plain", 0, peer),
        Side("dflash-local, NF4, plain", 0, ours),
        Side("dflash-local, NF4, auto", None, ours),
    ]
    prompts = chosen(args.prompts, args.set)
    in_turn(sides, HubTokenizer(target), [text for _, text in prompts], args.max_tokens)
    print(f"{processor()}, {args.threads} thread(s), {len(prompts)} prompts ", end="")
    print(f"({prompts_hash(prompts)}), {args.max_tokens} tokens\n")
    rows = [side.figures(sides[0]) for side in sides]
    print(markdown_table(("program", "tok/s", "tokens per round", "over llama.cpp"), rows))


if __name__ == "__main__":
    main()
