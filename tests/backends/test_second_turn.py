"""With a long history only what is new is read, and the answer is that of a cold run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dflash_local.backend import Backend
from dflash_local.bench import first_difference
from dflash_local.chat import Chat, ChatOptions
from dflash_local.engine import Engine, Opened
from dflash_local.events import Done, Event, Prefill, Round
from dflash_local.prompting import ChatTokenizer
from dflash_local.sampling import SamplingParams
from dflash_local.tokenizer import HubTokenizer
from tests.support.chat_pair import chat_pair
from tests.support.kits import Kit, Options, TorchKit
from tests.support.soak import Answering, Watched


class Counting(Watched):
    """Counts the ids that it is fed as context."""

    fed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.fed += len(tokens)
        super().extend(tokens)


class Talk:
    """A chat whose answers can be held against cold, plain runs of the same requests."""

    def __init__(self, warm: Engine, counting: Counting, cold: Engine, tokens: int) -> None:
        self.warm, self.counting, self.cold = warm, counting, cold
        self.answering = Answering(warm)
        options = ChatOptions(SamplingParams(max_tokens=tokens), block=warm.info.block_size)
        self.chat = Chat(self.answering, options=options, model="pair")

    def answer(self, events: Iterator[Event], stop_after: int = 0) -> int:
        """Let it answer; return how many ids were read anew: those behind what the caches held."""
        held, self.counting.fed = list(self.counting.held), 0
        rounds = 0
        for event in events:
            if isinstance(event, Prefill):
                reused, total = event.reused, event.total
            elif isinstance(event, Round):
                rounds += 1
                if rounds == stop_after:
                    self.warm.stop()
            elif isinstance(event, Done):
                done = event
        assert done.reason in (("cancelled",) if stop_after else ("length", "stop"))
        assert self.answering.asked is not None
        self.asked, self.tokens = self.answering.asked[0], done.tokens
        shared = first_difference(held, self.asked.ids)
        assert reused == min(len(held) if shared is None else shared, total - 1)
        assert self.counting.fed == total - reused
        return self.counting.fed

    def check_cold(self) -> None:
        """The same ids from an empty cache, drafted by nobody."""
        settings = SamplingParams(max_tokens=len(self.tokens))
        cold = self.cold.complete(self.asked, settings, block=0, reuse=False)
        assert cold.usage.reused_tokens == 0
        assert cold.tokens == self.tokens


def talk_through(
    open_backend: Callable[[], Backend], tokenizer: ChatTokenizer, history: str, tokens: int
) -> None:
    """A long first turn, a second, a regenerate, a stopped reply, another turn, an edit."""
    counting: list[Counting] = []

    def opener() -> Opened:
        counting.append(Counting(open_backend()))
        return Opened(counting[0], tokenizer)

    with Engine(opener) as warm, Engine(lambda: Opened(open_backend(), tokenizer)) as cold:
        talk = Talk(warm, counting[0], cold, tokens)
        first = talk.answer(talk.chat.send(history))
        assert first == len(talk.asked.ids)
        assert talk.answer(talk.chat.send("And what then?")) < first / 5
        talk.check_cold()
        assert talk.answer(talk.chat.retry()) < first / 5
        assert talk.answer(talk.chat.retry(), stop_after=2) < first / 5
        assert talk.answer(talk.chat.send("Go on.")) < first / 5
        assert talk.answer(talk.chat.edit("Say it again.")) < first / 5
        talk.check_cold()


def test_after_a_long_first_turn(kit: Kit, tmp_path: Path) -> None:
    target, draft = chat_pair(tmp_path, positions=2048)
    dice = random.Random(4)
    history = "".join(chr(dice.randint(97, 122)) for _ in range(1500))
    options = Options(context=2048)
    talk_through(lambda: kit.open(target, draft, options), HubTokenizer(target), history, 24)


@pytest.mark.slow
def test_the_demo_pair() -> None:
    pytest.importorskip("torch")
    from dflash_local import demo
    from dflash_local.bench_topics import SUMMARISE

    target = demo.ensure(lambda stage, done, total: None)
    history = " ".join(text for _, text in SUMMARISE[:2])
    options = Options(context=1024)
    talk_through(
        lambda: TorchKit().open(target, demo.draft_folder(), options),
        HubTokenizer(target),
        history,
        48,
    )
