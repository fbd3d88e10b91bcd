"""Records what the demo draft has accepted at every token: ``record_acceptance.py PATHS TREES``.

The target decodes plainly; at each token as much as can be is drafted and verified, and only the
target's own token is kept. A width policy can then be replayed. Paths: a digit per token, and a
round of k ids at token t emits ``min(k, digit[t]) + 1`` tokens. Trees: a word per token, the
accepted ids' ranks in hexadecimal, or ``-``; a round of k ids accepts those before the first
rank beyond k.
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

PROMPTS, TOKENS = {False: 4, True: 2}, 90


def answer(backend: Backend, prompt: list[int], sampling: SamplingParams) -> list[str]:
    """What was accepted at each token of the plain answer."""
    backend.configure(sampling)
    backend.rewind(0)
    backend.extend(prompt)
    pending, found = backend.sample(), list[str]()
    while len(found) < TOKENS and pending not in backend.info.stop_ids:
        verdict = backend.verify(backend.propose(pending, backend.info.rows(sampling) - 1))
        backend.commit(1)
        branches = verdict.branches
        ranks = "" if branches is None else "".join(f"{rank:x}" for rank in branches.ranks)
        found.append(str(verdict.accepted) if branches is None else ranks or "-")
        pending = verdict.tokens[0]
    return found


def main(files: tuple[Path, Path]) -> None:
    """Record every topic."""
    folder = demo.ensure(lambda stage, done, total: None)
    tokenizer = HubTokenizer(folder)
    options = Options(dtype="fp32", context=1024)
    backend = open_pair(folder, demo.draft_folder(), options, lambda step: None)
    for file, branching in zip(files, (False, True), strict=True):
        traces: dict[str, list[str]] = {}
        for name, prompts in TOPICS.items():
            for _, text in prompts[: PROMPTS[branching]]:
                ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": text}], None))
                found = answer(backend, ids, SamplingParams(branching=branching))
                traces.setdefault(name, []).append((" " if branching else "").join(found))
        file.write_text(json.dumps(traces, indent=1) + "\n")


if __name__ == "__main__":
    main((Path(sys.argv[1]), Path(sys.argv[2])))
