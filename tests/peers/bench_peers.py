"""This program and the published ``dflash`` on the same pair, prompts and dtype, in turn.

``make bench-peers`` runs it. The peer gets an environment of its own, since it pins another
transformers; each side is one process that stays loaded, and they take turns prompt by prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_local import demo
from dflash_local.bench import first_difference
from dflash_local.bench_prompts import SETS, chosen, prompts_hash
from dflash_local.bench_setup import processor
from dflash_local.bench_view import markdown_table
from dflash_local.draft_config import read_draft_config
from dflash_local.tokenizer import HubTokenizer

HERE = Path(__file__).parent
PEER = "dflash[local]==0.1.0"
TORCH = "torch==2.13.0"


@dataclass
class Side:
    """One program with one block size, and what it has answered."""

    name: str
    block: int | None
    worker: subprocess.Popen[str]
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def answer(self, ids: list[int], max_tokens: int, stop_ids: list[int]) -> None:
        """Answer once more and add it up; the first token belongs to the prefill."""
        request = {
            "ids": ids,
            "max_tokens": max_tokens,
            "stop_ids": stop_ids,
            "block": self.block,
        }
        reply = ask(self.worker, request)
        self.tokens += len(reply["tokens"]) - 1
        self.seconds += reply["seconds"]
        self.rounds += reply["rounds"]
        self.answers.append(reply["tokens"])

    @property
    def tok_s(self) -> float:
        """Tokens over decode time."""
        return self.tokens / self.seconds

    def figures(self, peer: Side) -> tuple[str, str, str, str]:
        """Name, speed, tokens per round and speed over a peer's."""
        return (
            self.name,
            f"{self.tok_s:.1f}",
            f"{self.tokens / self.rounds:.2f}",
            f"{self.tok_s / peer.tok_s:.2f}",
        )


def environment(folder: Path, *requirements: Sequence[str]) -> Path:
    """The Python of an environment that holds a peer; made where it is not there.

    ``requirements`` are what pip is given, one call after the other.
    """
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for required in requirements:
            subprocess.run([*install, *required], check=True)
        ready.touch()
    return python


def start(python: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    """A worker that has loaded its pair."""
    worker = subprocess.Popen(
        [python, str(HERE / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )
    read(worker)
    return worker


def ask(worker: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    """Send a request and wait for its answer."""
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    return read(worker)


def read(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of a worker that is JSON; libraries print as well."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise SystemExit(f"A worker ended with status {worker.wait()}.")


def in_turn(
    sides: list[Side], tokenizer: HubTokenizer, texts: Sequence[str], max_tokens: int
) -> None:
    """Let every side answer every prompt, another one first each time; then end the workers."""
    stop_ids = list(tokenizer.stop_ids)
    for number, text in enumerate([texts[0], *texts]):
        ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": text}], None))
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:
            if number:
                side.answer(ids, max_tokens, stop_ids)
            else:  # a warm-up
                Side("", side.block, side.worker).answer(ids, 16, stop_ids)
    for worker in {id(side.worker): side.worker for side in sides}.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def table(sides: list[Side], peer: Side) -> str:
    """The figures in Markdown."""
    rows = [
        (
            *side.figures(peer),
            f"{sum(equal(a, b) for a, b in zip(side.answers, peer.answers, strict=True))}"
            f" of {len(side.answers)}",
        )
        for side in sides
    ]
    header = ("program", "tok/s", "tokens per round", f"over {peer.name}", "equal answers")
    return markdown_table(header, rows)


def equal(left: list[int], right: list[int]) -> bool:
    """Whether two answers have the same ids."""
    return first_difference(left, right) is None


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--set", default="all", choices=tuple(SETS))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--venv", type=Path, default=Path("build/peers"))
    args = parser.parse_args()
    if platform.system() != "Linux":
        raise SystemExit("The published dflash brings its PyTorch side on Linux only.")
    # torch goes first, pinned, so that a build without a card's libraries is kept.
    python = environment(args.venv.absolute(), ["-c", "constraints.txt", TORCH], [PEER])
    target = demo.ensure(lambda stage, done, total: None)
    pair = (str(target), str(demo.draft_folder()), args.dtype, str(args.threads))
    peer, ours = (
        start(str(python), "peer_dflash.py", *pair),
        start(sys.executable, "peer_ours.py", *pair),
    )
    block = read_draft_config(demo.draft_folder()).block_size
    sides = [
        Side("dflash 0.1.0", block, peer),
        Side("dflash-local", block, ours),
        Side("dflash-local, auto", None, ours),
        Side("dflash 0.1.0, plain", 0, peer),
        Side("dflash-local, plain", 0, ours),
    ]
    prompts = chosen(args.prompts, args.set)
    in_turn(sides, HubTokenizer(target), [text for _, text in prompts], args.max_tokens)
    print(f"{processor()}, {args.threads} thread(s), {args.dtype}, {len(prompts)} prompts ", end="")
    print(f"({prompts_hash(prompts)}), {args.max_tokens} tokens, block {block}\n")
    print(table(sides, sides[0]))


if __name__ == "__main__":
    main()
