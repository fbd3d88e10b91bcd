"""The published ``dflash`` behind a pipe: a JSON request a line, a JSON answer a line.

Runs in an environment of its own: ``peer_dflash.py TARGET DRAFT DTYPE THREADS``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import dflash.model as peer
import torch
from transformers import AutoModelForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(target_dir: str, draft_dir: str, dtype: str, threads: str) -> None:
    """Load, say so, answer until the pipe is closed."""
    torch.set_num_threads(int(threads))
    peer._cuda_time = time.perf_counter  # its clock waits for a card
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=DTYPES[dtype]).eval()
    draft = peer.DFlashDraftModel.from_pretrained(draft_dir, dtype=DTYPES[dtype]).eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(target, draft, json.loads(line))), flush=True)


def answer(target: Any, draft: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One greedy answer."""
    ids = torch.tensor([request["ids"]])
    with torch.inference_mode():
        out = peer.dflash_generate(
            draft,
            target,
            ids,
            request["max_tokens"],
            request["stop_ids"],
            block_size=max(1, request["block"]),
            return_stats=True,
        )
    return {
        "tokens": out.output_ids[0, ids.shape[1] :].tolist(),
        "seconds": out.time_per_output_token * out.num_output_tokens,
        "rounds": len(out.acceptance_lengths),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
