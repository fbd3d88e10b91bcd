"""This program behind the same pipe as its peer: ``peer_ours.py TARGET DRAFT DTYPE THREADS``."""

from __future__ import annotations

import json
import sys

import dflash_local
from dflash_local import SamplingParams


def main(target: str, draft: str, dtype: str, threads: str) -> None:
    """Load, say so, answer until the pipe is closed."""
    with dflash_local.load(
        target, draft=draft, dtype=dtype, threads=int(threads), backend="torch", context=2048
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
