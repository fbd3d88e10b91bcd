"""A long chat with everything that can happen to it, and what must hold all the while.

As a script: ``python -m tests.support.soak [TOKENS]`` on the demo pair.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_local.backend import Backend, BackendInfo, Proposal, Verdict
from dflash_local.chat import Chat, ChatOptions
from dflash_local.engine import Engine, Opened
from dflash_local.events import Done, Event, Round
from dflash_local.lookup import NOTHING, Found
from dflash_local.prompting import Message, Prompt
from dflash_local.sampling import SamplingParams

COMPARED = 10
"""Every so many replies one is answered again from a cold cache."""
_WORDS = ("river", "stone", "seven", "blue", "walk", "lamp", "because", "never", "north", "salt")


class Watched:
    """A backend that checks the state at the top of every round, and notes the ids in its cache."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.held: list[int] = []
        self.rounds = 0
        self._block: list[int] = []
        self._pending: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def rewind(self, position: int) -> int:
        reached = self._backend.rewind(position)
        assert reached <= position
        del self.held[reached:]
        self._block, self._pending = [], None
        self._check()
        return reached

    def extend(self, tokens: Sequence[int]) -> None:
        self._backend.extend(tokens)
        self.held.extend(tokens)
        self._check()

    def sample(self) -> int:
        self._pending = self._backend.sample()
        return self._pending

    def propose(self, pending: int, count: int, found: Found = NOTHING) -> Proposal:
        assert not self._block, "a block is open"
        assert pending == self._pending, "the newest id is the one that no cache holds"
        assert self._backend.position + count + 1 <= self._backend.info.context
        self._check()
        return self._backend.propose(pending, count, found)

    def verify(self, proposal: Proposal) -> Verdict:
        verdict = self._backend.verify(proposal)
        assert self._pending is not None
        self._block = [self._pending, *verdict.drafted]
        self._emitted = verdict.tokens
        return verdict

    def commit(self, keep: int) -> None:
        assert 1 <= keep <= len(self._block)
        before = self._backend.position
        self._backend.commit(keep)
        assert self._backend.position == before + keep
        self.held.extend(self._block[:keep])
        # Of k emitted ids the last is the new pending one: s + 1 ids are known, s are held.
        self._pending = self._emitted[keep - 1]
        self._block = []
        self.rounds += 1
        self._check()

    def _check(self) -> None:
        covered, position = self._backend.coverage, self._backend.position
        assert covered.target == position == len(self.held)
        if self._backend.info.draft is not None:
            assert covered.draft + covered.pending == position


@dataclass
class Answering:
    """An engine that notes what it was asked last."""

    engine: Engine
    asked: tuple[Prompt, SamplingParams, int | None] | None = None

    @property
    def info(self) -> BackendInfo:
        return self.engine.info

    def prompt(self, messages: Sequence[Message], thinking: bool | None = None) -> Prompt:
        return self.engine.prompt(messages, thinking)

    def stream(
        self,
        messages: Prompt,
        sampling: SamplingParams | None = None,
        *,
        block: int | None = None,
        thinking: bool | None = None,
        reuse: bool = True,
    ) -> Iterator[Event]:
        self.asked = (messages, sampling or SamplingParams(), block)
        return self.engine.stream(messages, sampling, block=block, thinking=thinking, reuse=reuse)


@dataclass
class Tally:
    """What a soak did."""

    tokens: int = 0
    turns: int = 0
    rounds: int = 0
    compared: int = 0
    reused: int = 0
    left_out: int = 0
    actions: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    resident: list[int] = field(default_factory=list)
    """Bytes of main memory after each turn; empty where the system does not tell."""


def soak(
    open_pair: Callable[[], Opened],
    *,
    tokens: int,
    turns: int,
    sampled: bool,
    seed: int = 0,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Chat until so many tokens and turns are through; raise where anything does not hold."""
    dice, tally = random.Random(seed), Tally()
    watched: list[Watched] = []

    def opener() -> Opened:
        opened = open_pair()
        watched.append(Watched(opened.backend))
        return Opened(watched[0], opened.tokenizer, opened.costs)

    with Engine(opener) as engine:
        answering = Answering(engine)
        chat = Chat(answering, model="pair")
        while tally.tokens < tokens or tally.turns < turns:
            chat.options = _options(dice, engine.info, 2 * tokens // turns, sampled)
            name, events = _action(chat, dice)
            done = _read(engine, events, dice)
            tally.turns += 1
            _count(tally.actions, name)
            if done is None:  # the stream was left before its end
                _count(tally.ends, "left")
                continue
            assert answering.asked is not None
            prompt = answering.asked[0]
            ids = [*prompt.ids, *prompt.said, *done.tokens]
            assert watched[0].held == ids[: len(watched[0].held)], "other ids than were emitted"
            tally.tokens += len(done.tokens)
            tally.reused += done.usage.reused_tokens
            _count(tally.ends, done.reason)
            if tally.turns % COMPARED == 0:
                _compare(engine, answering.asked, done.tokens)
                tally.compared += 1
            tally.resident += _resident()
            progress(tally)
        tally.left_out = chat.conversation.left_out
        tally.rounds = watched[0].rounds
    return tally


def _options(dice: random.Random, info: BackendInfo, most: int, sampled: bool) -> ChatOptions:
    """Random settings; whatever is sampled has a seed, so that it can be had again."""
    sampling = SamplingParams(max_tokens=dice.randint(1, most))
    if sampled and dice.random() < 0.5:
        sampling = replace(
            sampling,
            temperature=dice.choice([0.6, 1.0, 1.3]),
            top_p=dice.choice([1.0, 0.9]),
            top_k=dice.choice([0, 20]),
            repetition_penalty=dice.choice([1.0, 1.1]),
            seed=dice.randrange(1000),
        )
    if dice.random() < 0.2:
        sampling = replace(sampling, stop=(dice.choice(["zq", "the", "\n\n", "e"]),))
    block = dice.choice([None, None, 0, 2, info.block_size])
    return ChatOptions(sampling, block=block, drop_oldest=True)


def _action(chat: Chat, dice: random.Random) -> tuple[str, Iterator[Event]]:
    text = " ".join(dice.choices(_WORDS, k=dice.randint(1, 30)))
    if not chat.conversation.turns:
        return "send", chat.send(text)
    roll, last = dice.random(), chat.last
    if roll < 0.15:
        return "retry", chat.retry()
    if roll < 0.3:
        return "edit", chat.edit(text)
    if roll < 0.45 and last is not None and last.can_go_on and last.end != "context":
        return "go on", chat.go_on()
    if roll < 0.5 and len(chat.conversation.turns) > 3:
        chat.cut(len(chat.conversation.turns) - 2)
        return "cut", chat.send(text)
    return "send", chat.send(text)


def _read(engine: Engine, events: Iterator[Event], dice: random.Random) -> Done | None:
    """Read an answer to its end, stop it somewhere, or leave it."""
    roll = dice.random()
    stop_at = dice.randint(1, 20) if roll < 0.3 else 0
    rounds, done = 0, None
    for event in events:
        if isinstance(event, Round):
            rounds += 1
            assert event.accepted <= event.drafted
            assert 1 <= len(event.tokens) <= event.accepted + 1
            if rounds == stop_at and roll < 0.2:
                engine.stop()
            elif rounds == stop_at:
                break
        elif isinstance(event, Done):
            done = event
    close = getattr(events, "close", None)
    if close is not None:
        close()
    return done


def _compare(
    engine: Engine, asked: tuple[Prompt, SamplingParams, int | None], tokens: tuple[int, ...]
) -> None:
    """The same request from a cold cache gives the same ids, as far as the reply came."""
    prompt, sampling, block = asked
    cold = engine.complete(prompt, sampling, block=block, reuse=False)
    assert cold.usage.reused_tokens == 0
    assert cold.tokens[: len(tokens)] == tokens


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _resident() -> list[int]:
    try:
        return [4096 * int(Path("/proc/self/statm").read_text().split()[1])]
    except OSError:
        return []


def _main(tokens: int) -> None:
    import time

    from dflash_local.select import LoadOptions, PairOpener

    options = LoadOptions("torch", "fp32", context=2048, threads=1)
    pair = PairOpener("demo", options=options)
    begun = time.monotonic()

    def show(tally: Tally) -> None:
        held = f"{tally.resident[-1] >> 20} MiB" if tally.resident else ""
        spent = time.monotonic() - begun
        print(f"{spent:6.0f} s  {tally.turns} turns, {tally.tokens} tokens {held}", flush=True)

    turns = max(6, min(60, tokens // 20))
    print(
        soak(
            lambda: pair(lambda step: None),
            tokens=tokens,
            turns=turns,
            sampled=True,
            progress=show,
        )
    )


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
