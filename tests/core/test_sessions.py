"""Saved chats: whatever happened is in the file, and a crash loses at most one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dflash_local.backends.scripted import open_scripted
from dflash_local.chat import Answer, Chat, ChatOptions, Conversation, Turn, Version
from dflash_local.engine import Engine
from dflash_local.errors import DflashError, OptionError
from dflash_local.events import Done, Prefill, Resumed, Round, Text
from dflash_local.history import PromptHistory
from dflash_local.sampling import SamplingParams
from dflash_local.sessions import Session, SessionError, SessionStore, read, to_json, to_markdown
from dflash_local.trace import MOST_ROUNDS, Trace


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path)


@pytest.fixture
def engine() -> Engine:
    return Engine(partial(open_scripted, ("First answer.", "Second 🦊 answer.")))


def chat_of(engine: Engine, store: SessionStore, **options: int) -> Chat:
    conversation = Conversation("Be brief.")
    session = store.create(conversation, "pair")
    sampling = SamplingParams(**options) if options else SamplingParams()  # type: ignore[arg-type]
    return Chat(
        engine,
        conversation,
        options=ChatOptions(sampling),
        model="pair",
        record=session,
    )


def close(chat: Chat) -> None:
    assert isinstance(chat.record, Session)
    chat.record.close()


def path_of(store: SessionStore) -> Path:
    (path,) = store.folder.glob("*.jsonl")
    return path


def test_a_chat_is_read_back_as_it_was(engine: Engine, store: SessionStore) -> None:
    chat = chat_of(engine, store)
    list(chat.send("one\n[/]"))
    list(chat.send("two"))
    list(chat.retry())
    chat.show(0)
    chat.set_system("Be long.")
    conversation, model = read(path_of(store))
    assert conversation == chat.conversation
    assert model == "pair"
    close(chat)
    opened = store.open(path_of(store))
    assert opened.conversation == chat.conversation
    assert opened.conversation.turns[1].versions[1].answer is not None


def test_nothing_is_written_before_the_first_message(engine: Engine, store: SessionStore) -> None:
    chat_of(engine, store).set_system("x")
    assert not list(store.folder.glob("*.jsonl"))


def test_a_running_answer_is_in_the_file_round_by_round(
    engine: Engine, store: SessionStore
) -> None:
    chat = chat_of(engine, store)
    said = ""
    for event in chat.send("hi"):
        if isinstance(event, Round) and event.index == 3:
            conversation, _ = read(path_of(store))
            answer = conversation.turns[0].current.answer
            assert answer is not None
            said = answer.text
            assert answer.end == "interrupted"
    assert said
    assert "First answer.".startswith(said)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_a_torn_file_opens(engine: Engine, store: SessionStore, keep: float) -> None:
    chat = chat_of(engine, store)
    list(chat.send("hello"))
    close(chat)
    path = path_of(store)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    assert store.open(path).conversation.turns[0].current.user == "hello"


def test_what_is_no_chat_is_refused(store: SessionStore, tmp_path: Path) -> None:
    for content in ("", "not json\n", '{"kind":"other"}\n', "[1]\n"):
        path = tmp_path / "x.jsonl"
        path.write_text(content)
        with pytest.raises(SessionError):
            read(path)
    assert store.list() == []
    with pytest.raises(SessionError):
        read(tmp_path / "missing.jsonl")


def test_sessions_are_found_by_what_was_changed_last(store: SessionStore) -> None:
    for number in (2, 3, 1):
        path = store.folder / f"{number}.jsonl"
        path.write_text(json.dumps(HEADER) + "\n")
        os.utime(path, (1000 * number, 1000 * number))
    (store.folder / "4.jsonl").symlink_to("nowhere")
    assert [path.stem for path in store.newest()] == ["3", "2", "1"]
    assert [info.path.stem for info in store.list()] == ["3", "2", "1"]


def test_exports_hold_the_messages(engine: Engine, store: SessionStore) -> None:
    chat = chat_of(engine, store)
    list(chat.send("hi"))
    markdown = to_markdown(chat.conversation, "pair")
    assert "## You\n\nhi" in markdown
    assert "First answer." in markdown
    document = json.loads(to_json(chat.conversation, "pair"))
    assert document["messages"][-1] == {"role": "assistant", "content": "First answer."}


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("a\n```python\nx = 1", "a\n```python\nx = 1\n```"),
        ("a\n```python\nx = 1\n```", None),
        ("~~~~\n~~~\n```\n", "~~~~\n~~~\n```\n~~~~"),
        ("inline ``` and ```x``` here", None),
        ("```a`b```", None),
    ],
)
def test_an_export_closes_a_block_that_was_broken_off(text: str, closed: str | None) -> None:
    conversation = Conversation()
    conversation.turns = [Turn([Version("hi", Answer(text=text))])]
    exported = to_markdown(conversation)
    assert exported.endswith(f"## Assistant\n\n{closed or text}\n")


def test_regenerating_reuses_all_but_the_last_prompt_token(
    engine: Engine, store: SessionStore
) -> None:
    chat = chat_of(engine, store)
    list(chat.send("hi"))
    first, *_ = chat.retry()
    assert isinstance(first, Prefill)
    assert first.reused == first.total - 1
    assert len(chat.conversation.turns[0].versions) == 2


def test_editing_reuses_the_shared_prefix(engine: Engine, store: SessionStore) -> None:
    chat = chat_of(engine, store)
    list(chat.send("one"))
    list(chat.send("two words"))
    first, *_ = chat.edit("two other words")
    assert isinstance(first, Prefill)
    assert first.reused >= len("Be brief.") + len("one") + len("First answer.") + len("two ")
    assert [v.user for v in chat.conversation.turns[1].versions] == [
        "two words",
        "two other words",
    ]


def test_a_stopped_answer_goes_on_from_the_cache(engine: Engine, store: SessionStore) -> None:
    chat = chat_of(engine, store, max_tokens=6)
    done = list(chat.send("hi"))[-1]
    assert isinstance(done, Done)
    assert chat.last is not None
    assert chat.last.text == "First "
    chat.options = ChatOptions()
    resumed, first, *_ = events = list(chat.go_on())
    assert resumed == Resumed("First ", "")
    assert isinstance(first, Prefill)
    assert first.reused == first.total - 1
    assert chat.last.text == "First answer."
    assert isinstance(events[-1], Done)
    assert chat.last.end == "stop"
    with pytest.raises(OptionError):
        chat.go_on()
    conversation, _ = read(path_of(store))
    assert conversation == chat.conversation


def test_an_error_keeps_what_was_said(store: SessionStore) -> None:
    class Breaking:
        def __init__(self, engine: Engine) -> None:
            self.prompt: Callable[..., object] = engine.prompt
            self._engine = engine

        def stream(self, *args: object, **options: object) -> object:
            for event in self._engine.stream(*args, **options):  # type: ignore[arg-type]
                yield event
                if isinstance(event, Round) and event.index == 2:
                    raise DflashError("It broke.")

    engine = Engine(partial(open_scripted, ("A longer answer than two rounds.",)))
    chat = chat_of(engine, store)
    chat.engine = Breaking(engine)  # type: ignore[assignment]
    with pytest.raises(DflashError):
        list(chat.send("hi"))
    assert chat.last is not None
    assert chat.last.end == "error"
    assert chat.last.error == "It broke."
    assert chat.last.text
    assert not chat.last.can_go_on
    assert len(chat.conversation.messages()) == 3


def test_history_moves_and_keeps_the_unsent_text(tmp_path: Path) -> None:
    history = PromptHistory(tmp_path / "p.jsonl")
    for text in ("a", "b\nc", "b\nc"):
        history.add(text)
    again = PromptHistory(tmp_path / "p.jsonl")
    assert again.move(-1, "draft") == "b\nc"
    assert again.move(-1, "") == "a"
    assert again.move(-1, "") is None
    assert again.move(1, "") == "b\nc"
    assert again.move(1, "") == "draft"
    assert again.move(1, "") is None


HEADER = {"kind": "chat", "format": 1, "model": "pair", "system": ""}
USER = {"kind": "user", "turn": 0, "version": 0, "text": "hi"}


@pytest.mark.parametrize(
    "lines",
    [
        [{**HEADER, "format": 99}],
        [{**HEADER, "system": None}],
        [HEADER, {**USER, "text": None}],
        [HEADER, {**USER, "version": 99}],
        [HEADER, {**USER, "turn": -1}],
        [HEADER, {**USER, "turn": "0"}],
        [HEADER, USER, {**USER, "version": 99}],
        [HEADER, USER, {"kind": "show", "turn": 0, "version": 99}],
        [HEADER, USER, {"kind": "show", "turn": 0, "version": -1}],
        [HEADER, USER, {"kind": "cut", "turns": None}],
        [HEADER, USER, {"kind": "text", "turn": 0, "version": 0, "channel": "x", "text": "a"}],
        [HEADER, USER, {"kind": "answer", "turn": 0, "version": 0, "answer": {"text": None}}],
        [HEADER, USER, {"kind": "answer", "turn": 0, "version": 0, "answer": {"tokens": ["a"]}}],
        [HEADER, USER, {"kind": "answer", "turn": 0, "version": 0, "answer": {"usage": {}}}],
        [HEADER, USER, {"kind": "answer", "turn": 0, "version": 0, "answer": {"stats": 3}}],
        [HEADER, USER, {"kind": "answer", "turn": 0, "version": 0, "answer": {"end": "never"}}],
        [HEADER, USER, {"kind": "answer", "turn": 0, "version": 0, "answer": []}],
        [HEADER, {"text": "no kind"}],
    ],
)
def test_a_damaged_chat_does_not_hide_the_others(
    store: SessionStore, lines: list[dict[str, object]]
) -> None:
    for name, content in (("good", [HEADER, USER]), ("bad", lines)):
        text = "".join(json.dumps(line) + "\n" for line in content)
        (store.folder / f"{name}.jsonl").write_text(text)
    assert [info.path.stem for info in store.list()] == ["good"]
    with pytest.raises(SessionError):
        read(store.folder / "bad.jsonl")


USAGE: dict[str, object] = {
    "prompt_tokens": 3,
    "reused_tokens": 0,
    "completion_tokens": 9,
    "thinking_tokens": 0,
    "prefill_ms": 5.0,
    "decode_ms": 7.5,
}
STATS: dict[str, object] = {
    "rounds": 2,
    "plain_rounds": 1,
    "tokens": 8,
    "drafted": 7,
    "accepted": 6,
    "full_blocks": 0,
    "tau": 7.0,
    "tok_s": 1000.0,
    "decode_ms": 7.5,
    "positions": [{"position": 1, "accepted": 1, "rounds": 1}],
    "histogram": [0, 1],
}


def opened_answer(store: SessionStore, answer: dict[str, object]) -> Answer:
    """An answer after it was saved as these values, opened, and opened again."""
    line = {"kind": "answer", "turn": 0, "version": 0, "answer": {"text": "said", **answer}}
    path = store.folder / "x.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (HEADER, USER, line)))
    store.open(path).close()
    opened = read(path)[0].turns[0].current.answer
    assert opened is not None
    return opened


@pytest.mark.parametrize(
    ("group", "key"),
    [
        *(("usage", key) for key in USAGE),
        *(("stats", key) for key in STATS if key not in ("positions", "histogram")),
        ("stats", "draft_ms"),
        ("", "speedup"),
    ],
)
def test_damaged_figures_are_dropped_and_the_text_is_kept(
    store: SessionStore, group: str, key: str
) -> None:
    figures: dict[str, object] = {"usage": dict(USAGE), "stats": dict(STATS), "speedup": 2.0}
    good = opened_answer(store, figures)
    assert good.usage is not None
    assert good.stats is not None
    assert good.speedup == 2.0
    place = figures[group] if group else figures
    assert isinstance(place, dict)
    odd: list[float] = [-1, 10**30]
    if not isinstance(place.get(key), int):
        odd += [float("nan"), float("inf"), -float("inf"), -0.5, 1e30]
    for value in odd:
        place[key] = value
        answer = opened_answer(store, figures)
        assert (answer.text, answer.usage, answer.stats) == ("said", None, None)
        assert answer.speedup is None


@pytest.mark.parametrize(
    "stats",
    [
        {"accepted": 8},
        {"plain_rounds": 3},
        {"full_blocks": 3},
        {"histogram": [0, -1]},
        {"histogram": [0] * 100_000},
        {"positions": [{"position": 1, "accepted": 2, "rounds": 1}]},
        {"positions": [{"position": 1, "accepted": 10**30, "rounds": 10**30}]},
    ],
)
def test_figures_that_contradict_each_other_are_dropped(
    store: SessionStore, stats: dict[str, object]
) -> None:
    answer = opened_answer(store, {"usage": USAGE, "stats": {**STATS, **stats}})
    assert (answer.text, answer.usage, answer.stats) == ("said", None, None)


@pytest.mark.parametrize("tokens", [[-1], [1, 10**30]])
def test_from_ids_that_cannot_be_nothing_goes_on(store: SessionStore, tokens: list[int]) -> None:
    answer = opened_answer(store, {"tokens": tokens, "end": "length", "usage": USAGE})
    assert not answer.can_go_on
    assert answer.usage is not None


def test_deep_nesting_is_damage(store: SessionStore) -> None:
    (store.folder / "x.jsonl").write_text("[" * 100_000 + "\n")
    assert store.list() == []


@pytest.mark.parametrize("folder", ["/dev/null/x", "/proc/x"])
def test_a_chat_that_cannot_be_saved_goes_on(engine: Engine, folder: str) -> None:
    store = SessionStore(Path(folder))
    chat = chat_of(engine, store)
    session = chat.record
    assert isinstance(session, Session)
    assert session.trouble() is None
    list(chat.send("hi"))
    assert chat.last is not None
    assert chat.last.text == "First answer."
    trouble = session.trouble()
    assert trouble is not None
    assert "cannot be saved" in trouble.cause
    assert session.trouble() is None  # told once
    list(chat.send("more"))
    chat.cut(0)
    session.close()
    assert store.list() == []
    assert store.newest() == ()


def test_a_line_that_was_cut_short_is_the_last(
    engine: Engine, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(engine, store)
    list(chat.send("hi"))
    whole = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: whole(file, data[:5]))
        list(chat.send("lost"))
    list(chat.send("lost too"))
    conversation, _ = read(path_of(store))
    assert [turn.current.user for turn in conversation.turns] == ["hi"]


def test_where_the_text_came_from_is_saved(engine: Engine, store: SessionStore) -> None:
    chat = chat_of(engine, store)
    list(chat.send("hi"))
    events = list(chat.send("more"))  # several bytes to a character
    conversation, _ = read(path_of(store))
    answer = conversation.turns[1].current.answer
    assert answer is not None
    trace = Trace.decode(answer.trace, answer.text)
    said = [
        (piece.origin, piece.text)
        for event in events
        if isinstance(event, Text)
        for piece in event.pieces
    ]
    assert [piece for round_ in trace.rounds for piece in round_.pieces] == said
    rounds = [event for event in events if isinstance(event, Round)]
    assert [(r.drafted, r.accepted, r.emitted) for r in trace.rounds[1:]] == [
        (r.drafted, r.accepted, len(r.tokens)) for r in rounds
    ]


def test_an_answer_that_goes_on_is_traced_on(engine: Engine, store: SessionStore) -> None:
    chat = chat_of(engine, store, max_tokens=6)
    list(chat.send("hi"))
    assert chat.last is not None
    before = Trace.decode(chat.last.trace, chat.last.text).rounds
    chat.options = ChatOptions()
    list(chat.go_on())
    trace = Trace.decode(chat.last.trace, chat.last.text)
    assert trace.rounds[: len(before)] == before
    assert "".join(text for r in trace.rounds for _, text in r.pieces) == "First answer."


@pytest.mark.parametrize(
    "saved",
    ["", "7.4.5", "x", "7.4.5:d3;", "7.4.5:z3", f"{'9' * 5000}.0.0:d1", "1.1.1:d999;0.0.0:"],
)
def test_an_odd_trace_costs_no_text(saved: str) -> None:
    rounds = Trace.decode(saved, "some text").rounds
    assert "".join(text for r in rounds for _, text in r.pieces) == "some text"


@pytest.mark.parametrize(
    "saved",
    [
        ";".join(["1.1.1:d1"] * (MOST_ROUNDS + 500)),
        ";".join(["1.1.1:d1"] * 2_000_000),
        "1.1.1:" + "d1" * 2_000_000,
        "1.1.1:" + "d" + "1" * 4_000_000,
        ";" * 2_000_000,
    ],
    ids=["a little long", "rounds", "runs", "digits", "nothing"],
)
def test_a_trace_without_end_costs_neither_time_nor_text(saved: str) -> None:
    text = "x" * (MOST_ROUNDS + 300)
    rounds = Trace.decode(saved, text).rounds
    assert len(rounds) <= MOST_ROUNDS + 1
    assert "".join(said for r in rounds for _, said in r.pieces) == text


def test_of_a_long_trace_the_beginning_is_told_apart() -> None:
    text = "x" * (MOST_ROUNDS + 300)
    *rounds, rest = Trace.decode(";".join(["1.1.1:d1"] * len(text)), text).rounds
    assert len(rounds) == MOST_ROUNDS
    assert rounds[-1].pieces == [("draft", "x")]
    assert rest.pieces == [("plain", "x" * 300)]
    whole = Trace.decode(";".join(["1.1.1:d1"] * MOST_ROUNDS), text[:MOST_ROUNDS])
    assert whole.rounds == rounds


def test_a_chat_saved_without_traces_opens(engine: Engine, store: SessionStore) -> None:
    chat = chat_of(engine, store)
    list(chat.send("hi"))
    close(chat)
    path = path_of(store)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.get("answer", {}).pop("trace", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = store.open(path).conversation.turns[0].current.answer
    assert answer is not None
    assert answer.trace == ""
    assert answer.text == "First answer."
