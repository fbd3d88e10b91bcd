"""The loop's properties, for every acceptance pattern, width, stop and limit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.backends.scripted import ScriptedBackend, cycling, mixed_target
from dflash_local.errors import ContextFull, OptionError
from dflash_local.events import Done, Event, Prefill, Round, Text
from dflash_local.loop import generate
from dflash_local.sampling import SamplingParams
from dflash_local.text import ReplyText
from dflash_local.width import FixedWidth
from tests.support.driving import PROMPT, done, run, text

VOCAB = 128


def scripted(
    pattern: Sequence[int], block_size: int = 8, context: int = 512, vocab: int = VOCAB
) -> ScriptedBackend:
    return ScriptedBackend(
        mixed_target(vocab),
        cycling(pattern),
        block_size=block_size,
        vocab_size=vocab,
        context=context,
        stop_ids=(),
    )


def plain_ids(length: int, vocab: int = VOCAB, prompt: Sequence[int] = PROMPT) -> list[int]:
    rule, ids = mixed_target(vocab), list(prompt)
    for _ in range(length):
        ids.append(rule(ids))
    return ids[len(prompt) :]


@settings(max_examples=300, deadline=None)
@given(
    pattern=st.lists(st.integers(0, 15), min_size=1, max_size=6),
    block=st.integers(1, 16),
    length=st.integers(1, 70),
    stop_at=st.none() | st.integers(0, 69),
    prefill_slice=st.integers(1, 12),
)
def test_speculative_ids_are_plain_ids(
    pattern: list[int], block: int, length: int, stop_at: int | None, prefill_slice: int
) -> None:
    truth = plain_ids(length, vocab=100_003)  # so large that ids hardly repeat
    stop_ids = [truth[stop_at]] if stop_at is not None and stop_at < length else []
    if stop_ids:
        truth = truth[: truth.index(stop_ids[0]) + 1]
    events = run(
        scripted(pattern, block, vocab=100_003),
        count=block - 1,
        max_tokens=length,
        stop_ids=stop_ids,
        prefill_slice=prefill_slice,
    )
    end = done(events)
    assert end.tokens == tuple(truth)
    assert end.reason == ("stop" if stop_ids else "length")
    rounds = [event for event in events if isinstance(event, Round)]
    assert sum(len(r.tokens) for r in rounds) == len(truth) - 1
    assert [token for r in rounds for token in r.tokens] == truth[1:]
    assert all(r.drafted <= block - 1 for r in rounds)
    shown = "".join(text(event.pieces) for event in events if isinstance(event, Text))
    assert shown == "".join(f"[{i}]" for i in truth if i not in stop_ids)


@settings(max_examples=100, deadline=None)
@given(
    pattern=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    at=st.integers(0, 30),
    span=st.integers(1, 3),
    limit=st.integers(1, 40),
)
def test_a_stop_string_ends_text_ids_and_counts_at_one_token(
    pattern: list[int], at: int, span: int, limit: int
) -> None:
    truth = plain_ids(40, vocab=100_003)
    stop = "".join(f"[{i}]" for i in truth[at : at + span])
    end = done(run(scripted(pattern, vocab=100_003), count=7, max_tokens=limit, stop=[stop]))
    last = at + span  # tokens emitted once the string is complete
    assert end.tokens == tuple(truth[: min(last, limit)])
    assert end.reason == ("stop_string" if last <= limit else "length")
    assert end.usage.completion_tokens == len(end.tokens)
    assert end.stats.tokens == len(end.tokens) - 1


@pytest.mark.parametrize(
    ("limit", "reason", "kept"), [(2, "length", 2), (3, "stop", 3), (5, "stop", 3)]
)
def test_a_stop_within_the_limit_wins(limit: int, reason: str, kept: int) -> None:
    ids = plain_ids(6)
    stop = ids[2]
    assert stop not in ids[:2]
    end = done(run(scripted([7]), count=7, max_tokens=limit, stop_ids=[stop]))
    assert (end.reason, len(end.tokens)) == (reason, kept)


def test_every_stop_id_of_several_stops() -> None:
    ids = plain_ids(20, vocab=100_003)
    for one, other in itertools.permutations((4, 9), 2):
        end = done(run(scripted([3], vocab=100_003), count=7, stop_ids=[ids[one], ids[other]]))
        assert end.tokens == tuple(ids[:5])


def test_a_stop_id_among_rejected_drafts_has_no_effect() -> None:
    rule, history = mixed_target(VOCAB), list(PROMPT)
    history.append(rule(history))
    wrong = (rule(history) + 1) % VOCAB  # what the scripted draft proposes where it is wrong
    end = done(run(scripted([0]), count=1, max_tokens=2, stop_ids=[wrong]))
    assert (end.reason, end.tokens) == ("length", tuple(plain_ids(2)))


def test_a_stop_as_first_token_means_no_round() -> None:
    events = run(scripted([3]), stop_ids=[plain_ids(1)[0]])
    assert not any(isinstance(event, Round) for event in events)
    assert (done(events).reason, len(done(events).tokens)) == ("stop", 1)


def test_the_context_ends_an_answer() -> None:
    backend = scripted([7], context=20)
    end = done(run(backend, count=7, max_tokens=None))
    assert end.reason == "context"
    assert backend.position == 20
    assert end.tokens == tuple(plain_ids(13))


def test_a_prompt_that_fills_the_context_gets_one_token() -> None:
    end = done(run(scripted([3], context=len(PROMPT)), max_tokens=None))
    assert (end.reason, len(end.tokens)) == ("context", 1)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with pytest.raises(ContextFull, match="8 tokens, the context holds 7"):
        run(scripted([3], context=7))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(OptionError, match="empty"):
        run(scripted([3]), ())


def test_origins_are_as_accepted() -> None:
    events = run(scripted([2, 7, 0], block_size=8), count=7, max_tokens=13)
    origins = [
        [(piece.origin, piece.text.count("[")) for piece in event.pieces]
        for event in events
        if isinstance(event, Text)
    ]
    assert origins == [
        [("first", 1)],
        [("draft", 2), ("correction", 1)],
        [("draft", 7), ("bonus", 1)],
        [("correction", 1)],
    ]


def test_plain_rounds_say_so() -> None:
    events = run(scripted([2]), count=0, max_tokens=3)
    pieces = [p for e in events if isinstance(e, Text) for p in e.pieces]
    assert [piece.origin for piece in pieces] == ["first", "plain", "plain"]


def stream(backend: ScriptedBackend, answers: Sequence[bool]) -> list[Event]:
    """Run with a ``cancelled`` that answers from a list, then stays True."""
    script = iter(answers)
    return list(
        generate(
            backend,
            PROMPT,
            SamplingParams(max_tokens=50),
            width=FixedWidth(3),
            reader=ReplyText(lambda ids: "x" * len(ids)),
            stop_ids=frozenset(),
            cancelled=lambda: next(script, True),
            prefill_slice=3,
        )
    )


def test_cancelling_in_the_prefill_stops_within_a_slice() -> None:
    backend = scripted([3])
    events = stream(backend, [False])
    assert (done(events).reason, done(events).tokens) == ("cancelled", ())
    assert backend.position == 3


def test_cancelling_in_the_answer_keeps_whole_rounds() -> None:
    backend = scripted([3])
    events = stream(backend, [False] * 3 + [False] * 2)
    end = done(events)
    assert end.reason == "cancelled"
    assert end.tokens == tuple(plain_ids(len(end.tokens)))
    assert backend.position == len(PROMPT) + len(end.tokens) - 1


def test_slices_end_at_the_same_borders_wherever_they_start() -> None:
    backend = scripted([3])
    backend.extend(PROMPT[:4])
    seen = [e.done for e in stream(backend, [False] * 9) if isinstance(e, Prefill)]
    assert seen == [4, 6, 8]


def test_reused_tokens_are_told() -> None:
    backend = scripted([3])
    backend.extend(PROMPT[:5])
    events = stream(backend, [False] * 4)
    assert next(e.reused for e in events if isinstance(e, Prefill)) == 5
    end = events[-1]
    assert isinstance(end, Done)
    assert (end.usage.prompt_tokens, end.usage.reused_tokens) == (8, 5)
