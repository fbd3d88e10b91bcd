"""Plain mode: words instead of pictures, commands that are never sent."""

from __future__ import annotations

import io

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.service import Service
from dflash_local.tui.app import Options, first_session
from dflash_local.tui.plain import PlainChat


def chat(lines: str, opener: ScriptedOpener) -> tuple[str, list[str]]:
    source, target = io.StringIO(lines), io.StringIO()
    session = first_session("pair", Options())
    with Service(opener) as service:
        assert PlainChat(service, "pair", session, source, target).run() == 0
    return target.getvalue(), [turn.current.user for turn in session.conversation.turns]


def test_roles_are_words_and_one_sentence_ends_a_turn() -> None:
    said, users = chat("hi\nmore\n", ScriptedOpener(("One.\x1b[31m", "Two.")))
    assert "You: hi\nAssistant: One.␛[31m\n" in said
    assert said.count("tokens per second") == 2
    assert "\x1b" not in said
    assert users == ["hi", "more"]


def test_commands_are_not_sent() -> None:
    said, users = chat("hi\n/unknown\n/retry\n//slash\n/quit\nnever\n", ScriptedOpener(("Yes.",)))
    assert users == ["hi", "/slash"]
    assert said.count("Commands here") == 1
    assert said.count("Assistant: Yes.") == 3
