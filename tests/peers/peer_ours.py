"""This program behind the same pipe as its peer: ``peer_ours.py TARGET DRAFT NUMBERS THREADS``,
where NUMBERS is a dtype, or ``nf4``."""

from __future__ import annotations

import json
import sys

import dflash_local
from dflash_local import SamplingParams


def main(target: str, draft: str, numbers: str, threads: str) -> None:
    """Load, say so, answer until the pipe is closed."""
    quantised = numbers == "nf4"
    with dflash_local.load(
        target,
        draft=draft,
        dtype=None if quantised else numbers,
        quantize=numbers if quantised else None,
        threads=int(threads),
        backend="torch",
        context=2048,
    ) as engine:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            reply = engine.complete(
                request["ids"],
                SamplingParams(max_tokens=request["max_tokens"]),
                block=request["block"],
                reuse=False,
            )
            figures = {
                "tokens": reply.tokens,
                "seconds": reply.stats.decode_ms / 1000.0,
                "rounds": reply.stats.rounds,
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
