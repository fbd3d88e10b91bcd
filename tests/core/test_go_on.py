"""A reply that was cut off goes on as if it had not been."""

from __future__ import annotations

from functools import partial

import pytest

from dflash_local.backends.scripted import open_scripted
from dflash_local.chat import Chat, ChatOptions
from dflash_local.engine import Engine
from dflash_local.errors import OptionError
from dflash_local.events import Done
from dflash_local.prompting import Prompt
from dflash_local.sampling import SamplingParams
from dflash_local.text import ThinkTags

REPLIES = ("ab🦊cd", "<think>plan</think>\n\nanswer", "hello STOP more", "plain words")


def told(engine: Engine, cut: int, stop: tuple[str, ...] = ()) -> tuple[str, str, str]:
    """Send, cut after ``cut`` ids, go on to the end; the text, the thinking and the reason."""
    chat = Chat(engine)
    chat.options = ChatOptions(SamplingParams(max_tokens=cut, stop=stop))
    list(chat.send("go"))
    chat.options = ChatOptions(SamplingParams(stop=stop))
    if chat.last is not None and chat.last.can_go_on:
        list(chat.go_on())
    assert chat.last is not None
    return chat.last.text, chat.last.thinking, chat.last.end


@pytest.mark.parametrize("reply", REPLIES)
def test_wherever_it_was_cut_the_answer_is_the_same(reply: str) -> None:
    opener = partial(open_scripted, (reply,), tags=ThinkTags())
    stop = ("STOP",) if "STOP" in reply else ()
    with Engine(opener) as engine:
        whole = told(engine, 1000, stop)
        for cut in range(1, len(reply.encode()) + 1):
            assert told(engine, cut, stop) == whole, cut


def test_ids_of_another_model_are_refused() -> None:
    with Engine(partial(open_scripted, ("a long answer",))) as engine:
        chat = Chat(engine, model="one")
        chat.options = ChatOptions(SamplingParams(max_tokens=3))
        list(chat.send("go"))
        chat.model = "two"
        with pytest.raises(OptionError, match="by one, this is two"):
            chat.go_on()


@pytest.mark.parametrize("bad", [-1, 260, 2**40])
def test_ids_beyond_the_vocabulary_are_refused(bad: int) -> None:
    with Engine(partial(open_scripted, ("Hi.",))) as engine:
        for prompt in (Prompt((1, bad)), Prompt((1,), said=(bad,))):
            with pytest.raises(OptionError, match="outside the vocabulary"):
                engine.stream(prompt)
        done = list(engine.stream("x"))[-1]
        assert isinstance(done, Done)


def test_halves_of_surrogate_pairs_do_no_harm() -> None:
    with Engine(partial(open_scripted, ("Hi.",))) as engine:
        assert engine.complete("\ud800 x").text == "Hi."
