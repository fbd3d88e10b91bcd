"""The end of the context: narrower rounds, a clear end, and room made by leaving out old turns."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from dflash_local.backends.scripted import open_scripted
from dflash_local.chat import Chat, ChatOptions
from dflash_local.engine import Engine
from dflash_local.errors import ContextFull
from dflash_local.events import Done, Round
from dflash_local.sampling import SamplingParams
from dflash_local.sessions import SessionStore, read

LONG = "".join(chr(97 + (i * i) % 23) for i in range(400))
CONTEXT = 256


@pytest.fixture
def engine() -> Engine:
    return Engine(partial(open_scripted, (LONG,), accepts=(7,), context=CONTEXT))


def chat(engine: Engine, *, drop_oldest: bool = False) -> Chat:
    options = ChatOptions(SamplingParams(max_tokens=20), drop_oldest=drop_oldest)
    return Chat(engine, options=options, model="pair")


def unlimited(talk: Chat) -> None:
    talk.options = ChatOptions()


def test_rounds_shrink_before_the_end_and_the_reason_is_told(engine: Engine) -> None:
    talk = chat(engine)
    list(talk.send("a" * 60))
    unlimited(talk)
    rounds = [event for event in talk.send("b" * 60) if isinstance(event, Round)]
    assert talk.last is not None
    assert talk.last.end == "context"
    assert rounds[-1].position == CONTEXT
    assert all(r.position - len(r.tokens) + r.drafted + 1 <= CONTEXT for r in rounds)
    assert rounds[0].drafted == 7
    held = talk.last.usage
    assert held is not None
    assert held.prompt_tokens + len(talk.last.tokens) == CONTEXT + 1  # the last id is in no cache


def test_going_on_out_of_a_full_context_leaves_the_oldest_turns_out(engine: Engine) -> None:
    talk = chat(engine)
    list(talk.send("a" * 60))
    unlimited(talk)
    list(talk.send("b" * 60))
    before = talk.last
    assert before is not None
    assert before.can_go_on
    list(talk.go_on())
    assert talk.conversation.left_out == 1
    assert len(talk.conversation.turns) == 2
    after = talk.last
    assert after is not None
    assert after.tokens[: len(before.tokens)] == before.tokens
    assert len(after.tokens) > len(before.tokens)
    with pytest.raises(ContextFull, match="last turn alone"):
        talk.go_on()
    assert [m["content"][:1] for m in talk.conversation.messages()] == ["b", after.text[:1]]
    assert len(talk.conversation.messages(whole=True)) == 4


def test_a_prompt_without_room_is_an_error_after_which_room_can_be_made(engine: Engine) -> None:
    talk = chat(engine)
    for letter in "abc":
        list(talk.send(letter * 20))
    with pytest.raises(ContextFull, match="leave out the oldest turns"):
        list(talk.send("d" * 180))
    assert talk.last is not None
    assert talk.last.end == "error"
    with pytest.raises(ContextFull):
        list(talk.send("e" * 190))
    # A question that was never answered is not shown to the model, which would copy the silence.
    assert [m["content"][0] for m in talk.conversation.messages()[::2]] == ["a", "b", "c", "e"]
    assert all(m["content"] for m in talk.conversation.messages())
    talk.cut(4)
    assert talk.make_room() > 0
    done = list(talk.retry())[-1]
    assert isinstance(done, Done)
    assert done.reason in ("length", "context")


def test_one_turn_that_does_not_fit_is_an_error_whatever_is_left_out(engine: Engine) -> None:
    talk = chat(engine, drop_oldest=True)
    list(talk.send("a"))
    with pytest.raises(ContextFull):
        list(talk.send("b" * 400))
    assert talk.make_room() == 0
    talk.cut(0)
    assert talk.conversation.left_out == 0
    assert isinstance(list(talk.send("c"))[-1], Done)


def test_asked_to_it_makes_room_by_itself_and_seldom(engine: Engine) -> None:
    talk = chat(engine, drop_oldest=True)
    left_out = []
    for number in range(30):
        list(talk.send(f"{number:020}"))
        assert talk.last is not None
        assert talk.last.end in ("stop", "length")
        left_out.append(talk.conversation.left_out)
    steps = [after - before for before, after in pairwise(left_out)]
    assert left_out[-1] > 20
    assert sum(step > 0 for step in steps) < len(steps) / 2, "each time the caches are read anew"
    last = talk.last
    assert last is not None
    assert last.usage is not None
    assert len(talk.conversation.turns) == 30


def test_what_is_left_out_is_saved_and_a_cut_brings_it_back(engine: Engine, tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    talk = chat(engine)
    talk.record = store.create(talk.conversation, "pair")
    for letter in "abc":
        list(talk.send(letter * 20))
    talk.make_room()
    (path,) = tmp_path.glob("*.jsonl")
    assert read(path)[0] == talk.conversation
    talk.record.close()
    again = store.open(path)
    again.close()
    assert read(path)[0].left_out == talk.conversation.left_out > 0
    talk.record = None
    talk.cut(1)
    assert talk.conversation.left_out == 0
