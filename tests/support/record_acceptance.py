"""Records what the demo draft has accepted at every token: ``record_acceptance.py FILE``.

The target decodes plainly; at each token the whole block is drafted and verified, and only the
target's own token is kept. A width policy can then be replayed on the digits: a round of k ids at
token t emits ``min(k, digit[t]) + 1`` tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dflash_local import demo
from dflash_local.backend import Backend
from dflash_local.backends.torch_load import open_pair
from dflash_local.bench_topics import TOPICS
from dflash_local.sampling import SamplingParams
from dflash_local.tokenizer import HubTokenizer
from tests.support.kits import Options

PROMPTS, TOKENS = 4, 90


def digits(backend: Backend, prompt: list[int]) -> str:
    """Accepted counts at each token of the plain answer."""
    backend.rewind(0)
    backend.extend(prompt)
    pending, found = backend.sample(), ""
    while len(found) < TOKENS and pending not in backend.info.stop_ids:
        verdict = backend.verify(backend.propose(pending, backend.info.block_size - 1))
        backend.commit(1)
        found += str(verdict.accepted)
        pending = verdict.tokens[0]
    return found


def main(file: Path) -> None:
    """Record every topic."""
    folder = demo.ensure(lambda stage, done, total: None)
    tokenizer = HubTokenizer(folder)
    options = Options(dtype="fp32", context=1024)
    backend = open_pair(folder, demo.draft_folder(), options, lambda step: None)
    backend.configure(SamplingParams())
    traces: dict[str, list[str]] = {}
    for name, prompts in TOPICS.items():
        for _, text in prompts[:PROMPTS]:
            ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": text}], None))
            traces.setdefault(name, []).append(digits(backend, ids))
    file.write_text(json.dumps(traces, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
