"""llama.cpp behind the same pipe: ``peer_llama.py GGUF THREADS``, plain greedy decoding.

Runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from llama_cpp import Llama


def main(gguf: str, threads: str) -> None:
    """Load, say so, answer until the pipe is closed."""
    count = int(threads)
    model = Llama(gguf, n_ctx=2048, n_threads=count, n_threads_batch=count, verbose=False)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


def answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One greedy answer; the first token belongs to the prefill."""
    model.reset()
    model.eval(request["ids"])
    tokens = [best(model)]
    begun = time.perf_counter()
    while len(tokens) < request["max_tokens"] and tokens[-1] not in request["stop_ids"]:
        model.eval(tokens[-1:])
        tokens.append(best(model))
    seconds = time.perf_counter() - begun
    return {"tokens": tokens, "seconds": seconds, "rounds": len(tokens) - 1}


def best(model: Any) -> int:
    """The best id at the last position, without the binding's chain of samplers."""
    logits = np.ctypeslib.as_array(model._ctx.get_logits(), shape=(model.n_vocab(),))
    return int(logits.argmax())


if __name__ == "__main__":
    main(*sys.argv[1:])
