"""Two threads on one engine, with cancellations, against a serial run of the same requests.

As a script: ``python -m tests.support.two_threads [SECONDS]`` on the demo pair.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_local import DflashError, Engine, SamplingParams, Text, load

PROMPTS = (
    "Name three rivers.",
    "What is the capital of France?",
    "Write a sentence about the sea.",
    "Count from one to ten.",
    "Why is the sky blue?",
)


@dataclass
class Tally:
    """What a run counted."""

    answers: int = 0
    cancelled: int = 0
    left_early: int = 0
    errors: list[str] = field(default_factory=list)

    def merge(self, other: Tally) -> None:
        """Add another thread's counts."""
        self.answers += other.answers
        self.cancelled += other.cancelled
        self.left_early += other.left_early
        self.errors += other.errors


def expected(engine: Engine, prompts: Sequence[str], tokens: int) -> dict[str, tuple[int, ...]]:
    """The serial run: plain decoding, one after the other, from cold caches."""
    settings = SamplingParams(max_tokens=tokens)
    return {p: engine.complete(p, settings, block=0, reuse=False).tokens for p in prompts}


def drive(
    engine: Engine, seconds: float, prompts: Sequence[str] = PROMPTS, tokens: int = 24
) -> Tally:
    """Both threads ask, stop and leave at random for some seconds; every answer is compared.

    A whole answer must equal the serial one; a cancelled one must be the beginning of it.
    """
    begun = time.monotonic()
    truth = expected(engine, prompts, tokens)
    each = (time.monotonic() - begun) / len(prompts)
    end = time.monotonic() + seconds
    tallies = [Tally(), Tally()]
    threads = [
        threading.Thread(target=_client, args=(engine, end, truth, tokens, seed, tally))
        for seed, tally in enumerate(tallies)
    ]
    stopping = threading.Event()
    stopper = threading.Thread(target=_stopper, args=(engine, each, stopping))
    for thread in (*threads, stopper):
        thread.start()
    for thread in threads:
        thread.join()
    stopping.set()
    stopper.join()
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    if expected(engine, prompts, tokens) != truth:
        total.errors.append("the serial run after it differs from the one before")
    return total


def _client(
    engine: Engine,
    end: float,
    truth: dict[str, tuple[int, ...]],
    tokens: int,
    seed: int,
    tally: Tally,
) -> None:
    chance = random.Random(seed)
    settings = SamplingParams(max_tokens=tokens)
    first = True
    try:
        while first or time.monotonic() < end:
            first = False
            prompt = chance.choice(list(truth))
            if chance.random() < 0.2:
                for event in engine.stream(prompt, settings):
                    if isinstance(event, Text):
                        tally.left_early += 1
                        break
                continue
            block = chance.choice((None, None, 0))
            reply = engine.complete(prompt, settings, block=block, reuse=chance.random() < 0.8)
            if reply.reason == "cancelled":
                tally.cancelled += 1
                if reply.tokens != truth[prompt][: len(reply.tokens)]:
                    tally.errors.append(f"{prompt}: a cancelled answer is no beginning")
                continue
            tally.answers += 1
            if reply.tokens != truth[prompt]:
                tally.errors.append(f"{prompt}: {reply.tokens} is not {truth[prompt]}")
    except DflashError as error:
        tally.errors.append(str(error))


def _stopper(engine: Engine, each: float, stopping: threading.Event) -> None:
    """Stops at random; an answer takes ``each`` seconds, so some come to their end."""
    chance = random.Random(99)
    while not stopping.wait(each * (0.1 + 6 * chance.random())):
        engine.stop()


if __name__ == "__main__":
    with load("demo", context=512, dtype="fp32") as loaded:
        result = drive(loaded, float(sys.argv[1]) if len(sys.argv) > 1 else 300.0)
    print(result)
    sys.exit(bool(result.errors))
