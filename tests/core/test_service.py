"""The engine in its process: same events as in this one, and a death is only an error."""

from __future__ import annotations

import io
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.engine import Engine
from dflash_local.errors import DflashError, EngineError, OptionError, WeightsError
from dflash_local.events import Done, LoadProgress, Prefill, Round, Text
from dflash_local.prompting import Prompt
from dflash_local.sampling import SamplingParams
from dflash_local.service import NO_LOG, Service
from dflash_local.service_child import BACKLOG, _Outbox, _Worker, frames
from dflash_local.service_wire import Ask, Batch, Start


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


@pytest.fixture
def slow(log: Path) -> Iterator[Service]:
    opener = ScriptedOpener(("word " * 2000,), accepts=(1,), round_ms=5)
    with Service(opener, log=log) as service:
        service.wait()
        yield service


def text_of(events: Iterable[object]) -> str:
    return "".join(p.text for e in events if isinstance(e, Text) for p in e.pieces)


def test_events_are_those_of_the_engine(log: Path) -> None:
    opener = ScriptedOpener(("Grüße 🦊 und mehr.",))
    with Service(opener, log=log) as service, Engine(lambda: opener(lambda _: None)) as engine:
        service.wait()
        assert service.info == engine.info
        mine, theirs = list(service.stream("hi")), list(engine.stream("hi"))
    assert text_of(mine) == text_of(theirs) == "Grüße 🦊 und mehr."
    assert [type(e) for e in mine] == [type(e) for e in theirs]
    assert isinstance(mine[0], Prefill)
    last, other = mine[-1], theirs[-1]
    assert isinstance(last, Done)
    assert isinstance(other, Done)
    assert last.tokens == other.tokens


def test_progress_arrives_in_order_and_prints_go_to_the_log(log: Path) -> None:
    seen: list[LoadProgress] = []
    with Service(ScriptedOpener(noise="native chatter"), log=log) as service:
        service.wait(seen.append)
    assert [event.done for event in seen] == list(range(11))
    assert log.read_text().count("native chatter") == 2


def test_a_failed_load_raises_its_own_error(log: Path) -> None:
    with (
        Service(ScriptedOpener(fail="Half a file."), log=log) as service,
        pytest.raises(WeightsError) as caught,
    ):
        service.wait()
    assert caught.value.cause == "Half a file."
    assert caught.value.next_step == "Pull it again."


def test_a_death_while_loading_is_told(log: Path) -> None:
    with (
        Service(ScriptedOpener(die=True), log=log) as service,
        pytest.raises(EngineError, match="signal 15"),
    ):
        service.wait()


def test_stop_ends_the_answer_and_the_next_one_is_whole(slow: Service) -> None:
    events: list[object] = []
    rounds_after = 0
    for event in slow.stream("hi"):
        events.append(event)
        if isinstance(event, Round) and event.index == 5:
            slow.stop()
        rounds_after += isinstance(event, Round) and event.index > 5
    done = events[-1]
    assert isinstance(done, Done)
    assert done.reason == "cancelled"
    assert rounds_after < 100
    again = list(slow.stream("hi", SamplingParams(max_tokens=20)))
    assert text_of(list(again)) == ("word " * 2000)[:20]


def test_a_stop_before_the_answer_begins_counts(slow: Service) -> None:
    stream = slow.stream("hi")
    slow.stop()
    done = list(stream)[-1]
    assert isinstance(done, Done)
    assert done.reason == "cancelled"


def test_leaving_the_iterator_stops_the_answer(slow: Service) -> None:
    for event in slow.stream("hi"):
        if isinstance(event, Text):
            break
    done = list(slow.stream("hi", SamplingParams(max_tokens=3)))[-1]
    assert isinstance(done, Done)
    assert done.usage.completion_tokens == 3


def test_a_killed_process_is_an_error_and_reload_works(slow: Service) -> None:
    seen: list[object] = []
    with pytest.raises(EngineError, match="signal 9") as caught:  # noqa: PT012
        for event in slow.stream("hi"):
            seen.append(event)
            if isinstance(event, Round) and event.index == 3:
                os.kill(slow.pid, signal.SIGKILL)
    assert str(slow.log) in caught.value.next_step
    assert text_of(seen)
    assert not slow.alive
    with pytest.raises(EngineError):
        list(slow.stream("still dead"))
    slow.reload()
    slow.wait()
    assert text_of(list(slow.stream("hi", SamplingParams(max_tokens=4)))) == "word"


def test_a_second_request_waits_its_turn(slow: Service) -> None:
    ends: list[Done] = []

    def ask() -> None:
        ends.extend(
            e for e in slow.stream("x", SamplingParams(max_tokens=8)) if isinstance(e, Done)
        )

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [end.usage.completion_tokens for end in ends] == [8, 8, 8]


def test_calls_and_refusals_cross_the_pipe(slow: Service) -> None:
    prompt = slow.prompt([{"role": "user", "content": "hi"}])
    assert isinstance(prompt, Prompt)
    assert slow.memory().total == 0
    with pytest.raises(OptionError):
        list(slow.stream("hi", SamplingParams(temperature=1.0)))
    going_on = replace(prompt, said=tuple(b"wor"))
    events = list(slow.stream(going_on, SamplingParams(max_tokens=2)))
    assert text_of(list(events)) == "d "


def test_a_long_backlog_loses_rounds_but_no_text() -> None:
    round_ = Round(1, 1, 1, (1, 2), 1.0, None, None, 5)
    items = [(7, event) for _ in range(BACKLOG) for event in (round_, Text(1, ()))]
    batches = frames(items)
    assert len(batches) == 1
    assert isinstance(batches[0], Batch)
    assert batches[0].events == (Text(1, ()),) * BACKLOG
    assert len(frames(items[:10])[0].events) == 10  # type: ignore[union-attr]


def test_errors_pickle() -> None:
    error = pickle.loads(pickle.dumps(OptionError("cause", "step")))  # noqa: S301
    assert isinstance(error, DflashError)
    assert (error.cause, error.next_step) == ("cause", "step")


def test_leaving_an_answer_that_has_ended_does_not_stop_the_next(slow: Service) -> None:
    first = slow.stream("a", SamplingParams(max_tokens=3))
    next(first)
    time.sleep(0.5)  # it ends, unread
    begun = threading.Event()
    ends: list[Done] = []

    def ask() -> None:
        for event in slow.stream("b", SamplingParams(max_tokens=300)):
            begun.set()
            if isinstance(event, Done):
                ends.append(event)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(30)
    first.close()  # type: ignore[attr-defined]
    thread.join(30)
    assert [(end.reason, end.usage.completion_tokens) for end in ends] == [("length", 300)]


def test_stop_reaches_the_running_answer_past_one_that_ended_unread(slow: Service) -> None:
    first = slow.stream("a", SamplingParams(max_tokens=3))
    next(first)
    time.sleep(0.5)
    second = slow.stream("b")
    next(second)
    slow.stop()
    done = list(second)[-1]
    assert isinstance(done, Done)
    assert done.reason == "cancelled"


@pytest.mark.parametrize("close", [True, False])
def test_a_stream_that_never_began_is_forgotten(slow: Service, close: bool) -> None:
    unread = slow.stream("never")
    if close:
        unread.close()  # type: ignore[attr-defined]
    else:
        del unread
    second = slow.stream("b")
    slow.stop()
    done = list(second)[-1]
    assert isinstance(done, Done)
    assert done.reason == "cancelled"
    assert text_of(list(slow.stream("hi", SamplingParams(max_tokens=4)))) == "word"


def test_a_stop_acts_on_its_own_request_alone() -> None:
    worker = _Worker(_Outbox(io.BytesIO()))
    worker.stop(7)
    assert not worker._stopped
    opener = ScriptedOpener(("word " * 400,), round_ms=2)
    worker.put(Start(opener))
    worker.put(Ask(1, "a", SamplingParams(max_tokens=50), None, None, True))
    worker.put(Ask(2, "b", SamplingParams(max_tokens=50), None, None, True))
    worker.stop(2)
    assert worker._stopped == {2}
    end = time.monotonic() + 30
    while worker._unfinished and time.monotonic() < end:
        time.sleep(0.01)
    assert not worker._unfinished
    assert not worker._stopped
    worker.close()


def test_an_unwritable_log_folder_costs_only_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_LOG", "/dev/null/x")
    with Service(ScriptedOpener(("Hi.",), noise="chatter")) as service:
        service.wait()
        assert text_of(list(service.stream("hi"))) == "Hi."
        assert service.log == NO_LOG
