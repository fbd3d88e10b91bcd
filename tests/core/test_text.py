"""Ids to text: characters over several ids, stop strings, thinking."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_local.events import Origin, Piece
from dflash_local.text import Detokenizer, ReplyText, ThinkTags

SAMPLES = ("ďábel 🦊 družina", "家族👨‍👩‍👧‍👦です", "a\u0301é〽️", "العربية", "\U0001f600", "plain")


def decode(ids: Sequence[int]) -> str:
    """Ids are bytes; 300 and above are special tokens without text."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def fallback_decode(ids: Sequence[int]) -> str:
    """As decoders with byte fallback do it: a run that is no UTF-8 is one mark per byte."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


def feed(reader: ReplyText, ids: Sequence[int], origins: Sequence[Origin] = ()) -> list[Piece]:
    pieces: list[Piece] = []
    for index, token in enumerate(ids):
        stopped = reader.push(token, origins[index] if origins else "plain")
        pieces.extend(reader.pieces())
        if stopped:
            return [*pieces, *reader.flush()]
    return [*pieces, *reader.flush()]


def answer(pieces: Sequence[Piece]) -> str:
    return "".join(p.text for p in pieces if p.channel == "answer")


def thinking(pieces: Sequence[Piece]) -> str:
    return "".join(p.text for p in pieces if p.channel == "think")


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("decoder", [decode, fallback_decode])
def test_joined_pieces_are_the_whole_text(sample: str, decoder: object) -> None:
    detokenizer = Detokenizer(decoder)  # type: ignore[arg-type]
    pieces = [detokenizer.push(i) for i in sample.encode()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.flush() == sample


@settings(max_examples=500, deadline=None)
@example([128, 300, 300, 300, 128, 225, 128, 300, 300, 128])
@given(ids=st.lists(st.integers(0, 255) | st.just(300), max_size=40))
def test_any_ids_join_to_their_decoding(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode)
    joined = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
    assert joined == decode(ids)


def test_a_tail_inside_a_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(i) for i in "x🦊".encode()[:-1]]
    assert "".join(pieces) == "x"
    assert detokenizer.flush() == "\ufffd"


def test_decoding_work_per_id_is_bounded() -> None:
    longest = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    detokenizer = Detokenizer(counting)
    for i in ("🦊abc" * 200).encode():
        detokenizer.push(i)
    assert longest < 12


def test_leading_spaces_that_a_decoder_strips_are_kept() -> None:
    words = {1: "▁Hello", 2: "▁big", 3: "▁world"}

    def sentencepiece(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(sentencepiece)
    assert "".join(detokenizer.push(i) for i in (1, 2, 3)) == "Hello big world"


@settings(max_examples=200, deadline=None)
@given(st.text("abST 🦊", max_size=30), st.lists(st.text("abST🦊", min_size=1), max_size=3))
def test_text_ends_before_the_first_stop_string(body: str, stops: list[str]) -> None:
    pieces = feed(ReplyText(decode, stops), body.encode())
    ends = [body.find(stop) for stop in stops if stop in body]
    # Reading stops at the id that completes a string, so a longer one may begin earlier.
    done_at = [body.find(s) + len(s) for s in stops if s in body]
    if not ends:
        assert answer(pieces) == body
        return
    first = min(done_at)
    begins = [body.find(s) for s in stops if s in body[:first]]
    assert answer(pieces) == body[: min(begins)]


def test_the_id_that_completes_a_stop_string_is_the_last() -> None:
    reader = ReplyText(decode, ["STOP"])
    stopped = [reader.push(i, "draft") for i in b"one STOP"]
    assert stopped == [False] * 7 + [True]
    assert answer(reader.pieces()) == "one "


def test_thinking_is_split_inside_one_id() -> None:
    def whole(ids: Sequence[int]) -> str:
        return "".join({0: "<think>\nhm", 1: "m.</think>\n\nYes"}[i] for i in ids)

    pieces = feed(ReplyText(whole, tags=ThinkTags()), (0, 1))
    assert (thinking(pieces), answer(pieces)) == ("hmm.", "Yes")


def test_a_reply_may_start_inside_thinking() -> None:
    reader = ReplyText(decode, tags=ThinkTags(), channel="think")
    pieces = feed(reader, b"I wonder</think>42")
    assert (thinking(pieces), answer(pieces)) == ("I wonder", "42")
    assert reader.thinking_tokens == len(b"I wonder</think>")


def test_tags_later_in_an_answer_are_text() -> None:
    pieces = feed(ReplyText(decode, tags=ThinkTags()), b"Use <think> and </think>.")
    assert (thinking(pieces), answer(pieces)) == ("", "Use <think> and </think>.")


def test_without_tags_everything_is_the_answer() -> None:
    assert answer(feed(ReplyText(decode), b"<think>x</think>")) == "<think>x</think>"


def test_pieces_keep_the_origin_of_each_character() -> None:
    origins: list[Origin] = ["first", "draft", "draft", "bonus"]
    pieces = feed(ReplyText(decode), b"abcd", origins)
    assert pieces == [
        Piece("a", "first"),
        Piece("b", "draft"),
        Piece("c", "draft"),
        Piece("d", "bonus"),
    ]


def test_held_text_keeps_its_origins() -> None:
    origins: list[Origin] = ["draft", "correction", "bonus"]
    pieces = feed(ReplyText(decode, ["<stop>"]), b"<sx", origins)
    assert [(p.text, p.origin) for p in pieces] == [
        ("<", "draft"),
        ("s", "correction"),
        ("x", "bonus"),
    ]
