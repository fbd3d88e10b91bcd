"""The engine: streaming, stopping, sharing, reuse, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from dflash_local.backend import Proposal, Verdict
from dflash_local.backends.scripted import ByteTokenizer, ScriptedBackend, open_scripted
from dflash_local.costs import Costs
from dflash_local.engine import Engine, Opened
from dflash_local.errors import ContextFull, DflashError, EngineError, OptionError
from dflash_local.events import Done, Prefill, Round
from dflash_local.sampling import SamplingParams

LONG = "The quick brown fox jumps over the lazy dog. " * 40


def opened(replies: tuple[str, ...] = ("Hi 🦊!", "Second."), **settings: float) -> Engine:
    return Engine(partial(open_scripted, replies, **settings))


def turn(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def test_complete_joins_the_stream() -> None:
    with opened() as engine:
        reply = engine.complete("hello")
    assert (reply.text, reply.thinking, reply.reason) == ("Hi 🦊!", "", "stop")
    assert reply.usage.completion_tokens == len("Hi 🦊!".encode()) + 1


def test_speculative_and_plain_agree() -> None:
    with opened((LONG,)) as engine:
        plain = engine.complete("go", block=0)
        assert plain.stats.drafted == 0
        for block in (1, 2, 5, 8, None):
            assert engine.complete("go", block=block).tokens == plain.tokens


@pytest.mark.parametrize("block", [-1, 9, 100])
def test_a_block_beyond_the_drafts_is_refused(block: int) -> None:
    with opened() as engine, pytest.raises(OptionError, match="8 at most"):
        engine.stream("hello", block=block)


def test_a_turn_feeds_only_what_is_new() -> None:
    with opened() as engine:
        first = engine.complete(turn("hello"))
        events = list(engine.stream(turn("hello", first.text, "and?")))
    prefill = [event for event in events if isinstance(event, Prefill)]
    held = first.usage.prompt_tokens + len(first.tokens) - 1  # the last id is in no cache
    assert prefill[0].reused == held
    assert prefill[-1].done == prefill[-1].total


@pytest.mark.parametrize("reuse", [True, False])
def test_reuse_does_not_change_the_answer(reuse: bool) -> None:
    with opened(("One.", "Two.", "Three.")) as engine:
        engine.complete(turn("a long first question"))
        engine.complete(turn("a"), SamplingParams(max_tokens=2))
        reply = engine.complete(turn("a long first question", "One.", "b"), reuse=reuse)
    assert reply.text == "Two."


def test_stop_ends_the_answer_after_a_round() -> None:
    with opened((LONG,), round_ms=2.0) as engine:
        seen = 0
        for event in engine.stream("go"):
            if isinstance(event, Round):
                seen += 1
                if seen == 3:
                    engine.stop()
            if isinstance(event, Done):
                assert event.reason == "cancelled"
        assert seen < 40
        assert engine.complete("go").text == LONG


def test_a_stop_before_the_answer_has_begun_is_not_lost() -> None:
    with opened((LONG,), round_ms=2.0, token_ms=20.0) as engine:
        events = engine.stream("go")
        threading.Timer(0.01, engine.stop).start()
        last = list(events)[-1]
        assert isinstance(last, Done)
        assert last.reason == "cancelled"
        asked = threading.Thread(target=lambda: list(engine.stream("x" * 50)))
        asked.start()
        waiting = engine.stream("go")
        first = next(waiting)  # its turn has come: the other one is through
        asked.join()
        engine.stop()
        assert isinstance(first, Prefill)
        last = list(waiting)[-1]
        assert isinstance(last, Done)
        assert last.reason == "cancelled"


def test_leaving_the_stream_stops_it_and_the_next_request_is_whole() -> None:
    with opened((LONG,), round_ms=2.0) as engine:
        for event in engine.stream("go"):
            if isinstance(event, Round):
                break
        assert engine.complete("go").text == LONG


def test_threads_take_turns() -> None:
    with opened((LONG,)) as engine:
        replies: list[str] = []
        workers = [
            threading.Thread(target=lambda i=i: replies.append(engine.complete(f"q{i}").text))
            for i in range(6)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert replies == [LONG] * 6


def test_closing_in_mid_answer_ends_it() -> None:
    engine = opened((LONG,), round_ms=5.0)
    events = engine.stream("go")
    next(events)
    engine.close()
    last = [event for event in events][-1]
    assert isinstance(last, Done)
    assert last.reason == "cancelled"
    with pytest.raises(EngineError, match="closed"):
        engine.complete("again")
    engine.close()


def test_an_error_while_loading_reaches_the_caller() -> None:
    def broken() -> tuple[ScriptedBackend, ByteTokenizer]:
        raise DflashError("No such thing.", "Try another.")

    with pytest.raises(DflashError, match=r"No such thing\. Try another\."):
        Engine(broken)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("rope_theta"), "cannot be loaded: KeyError: 'rope_theta'"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "Out of memory while loading"),
    ],
)
def test_a_librarys_error_while_loading_is_told(error: Exception, told: str) -> None:
    def broken() -> tuple[ScriptedBackend, ByteTokenizer]:
        raise error

    with pytest.raises(EngineError, match=told):
        Engine(broken)


class Failing(ScriptedBackend):
    """Breaks in the third verify, once."""

    def __init__(self, error: Exception) -> None:
        inner, _ = open_scripted((LONG,))
        self.__dict__.update(inner.__dict__)
        self._error: Exception | None = error
        self._calls = 0

    def verify(self, proposal: Proposal) -> Verdict:
        self._calls += 1
        if self._calls == 3 and self._error is not None:
            error, self._error = self._error, None
            raise error
        verdict: Verdict = super().verify(proposal)
        return verdict


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate"), "Out of memory in mid-answer"),
        (MemoryError(), "Out of memory in mid-answer"),
        (ValueError("boom"), "ValueError: boom"),
        (OptionError("As it is."), "As it is."),
    ],
)
def test_a_failed_round_is_told_and_the_engine_goes_on(error: Exception, told: str) -> None:
    with Engine(lambda: (Failing(error), ByteTokenizer())) as engine:
        with pytest.raises(DflashError, match=told):
            engine.complete("go")
        assert engine.complete("go").text == LONG


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "no message"),
        ([{"role": "robot", "content": "x"}], "Not a chat message"),
        ([{"role": "user"}], "Not a chat message"),
        ([{"role": "user", "content": 5}], "Not a chat message"),
        ([1, 2, 999], "999 is outside"),
        ([1, {"role": "user", "content": "x"}], "mixed"),
    ],
)
def test_bad_requests_are_refused(messages: list[object], told: str) -> None:
    with opened() as engine, pytest.raises(OptionError, match=told):
        engine.complete(messages)  # type: ignore[arg-type]


def test_options_that_the_backend_cannot_honour_are_refused() -> None:
    with opened() as engine:
        with pytest.raises(OptionError, match="greedy"):
            engine.complete("x", SamplingParams(temperature=0.7))
        assert engine.complete("x").text == "Hi 🦊!"


def test_a_prompt_beyond_the_context_is_an_error_and_the_engine_goes_on() -> None:
    with opened(context=64) as engine:
        with pytest.raises(ContextFull):
            engine.complete("x" * 200)
        assert engine.complete("x").text == "Hi 🦊!"


def test_the_backend_is_loaded_used_and_closed_on_one_thread() -> None:
    threads: set[int] = set()

    class Watching(ScriptedBackend):
        def __getattribute__(self, name: str) -> object:
            if name in ("extend", "verify", "commit", "close", "rewind", "configure"):
                threads.add(threading.get_ident())
            return super().__getattribute__(name)

    def opener() -> tuple[ScriptedBackend, ByteTokenizer]:
        threads.add(threading.get_ident())
        backend, tokenizer = open_scripted(("Hi.",))
        watching = Watching.__new__(Watching)
        watching.__dict__.update(backend.__dict__)
        return watching, tokenizer

    with Engine(opener) as engine:
        engine.complete("x")
        run_elsewhere(lambda: engine.complete("y"))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def run_elsewhere(work: Callable[[], object]) -> None:
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()


def tuned(ms: tuple[float, ...]) -> Engine:
    def opener() -> Opened:
        backend, tokenizer = open_scripted((LONG,), accepts=(0,))
        return Opened(backend, tokenizer, Costs(ms))

    return Engine(opener)


def test_with_costs_a_draft_that_does_not_pay_is_parked() -> None:
    with tuned((1.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0)) as engine:
        rounds = [event for event in engine.stream("go") if isinstance(event, Round)]
    assert [r.parked for r in rounds[:20]] == [True] * 20
    assert sum(r.drafted > 0 for r in rounds) < len(rounds) / 20


def test_a_wish_for_a_block_is_kept_whatever_it_costs() -> None:
    with tuned((1.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0)) as engine:
        sampling = SamplingParams(max_tokens=9)
        rounds = [e for e in engine.stream("go", sampling, block=4) if isinstance(e, Round)]
    assert [r.drafted for r in rounds] == [3, 3, 3, 3, 3, 3, 2, 1]
    assert not any(r.parked for r in rounds)
