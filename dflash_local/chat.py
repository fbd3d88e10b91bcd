"""Conversation and Chat: what was said, and the one way in which an answer comes about.

Sending, regenerating, editing and going on are entry points of the same task, so they cannot
drift apart. The engine reuses whatever its caches share with a request, so none of them needs to
know about caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from dflash_local.backend import BackendInfo
from dflash_local.errors import ContextFull, DflashError, OptionError
from dflash_local.events import Channel, Done, Event, Reason, Resumed, Round, Text, Usage
from dflash_local.prompting import Message, Prompt, whole
from dflash_local.sampling import SamplingParams
from dflash_local.stats import StatsSummary
from dflash_local.trace import Trace

_LOW, _FREED = 1 / 8, 1 / 3
"""Free part of the context below which room is made, and the part that is free afterwards.

Far apart, as the caches have to be read anew whenever a turn goes.
"""

End = Reason | Literal["error", "interrupted"]
"""How an answer ended: ``error`` when the engine broke off, ``interrupted`` when the app did."""

ENDS: dict[End, str] = {
    "stop": "stopped by eos",
    "stop_string": "stopped by a stop string",
    "length": "stopped at the token limit",
    "context": "the context is full",
    "cancelled": "stopped by you",
    "error": "broken off",
    "interrupted": "interrupted",
}
"""The same in words."""


class Answers(Protocol):
    """What a chat needs of an engine or a service."""

    @property
    def info(self) -> BackendInfo:
        """What is loaded."""
        ...

    def prompt(self, messages: Sequence[Message], thinking: bool | None = None) -> Prompt:
        """The ids of a request."""
        ...

    def stream(
        self,
        messages: Prompt,
        sampling: SamplingParams | None = None,
        *,
        block: int | None = None,
        thinking: bool | None = None,
        reuse: bool = True,
    ) -> Iterator[Event]:
        """Answer, event by event."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply of the model, whole or as far as it came."""

    text: str = ""
    thinking: str = ""
    end: End = "interrupted"
    model: str = ""
    tokens: tuple[int, ...] = ()
    """Emitted ids, from which a stopped answer can go on."""
    usage: Usage | None = None
    stats: StatsSummary | None = None
    error: str = ""
    speedup: float | None = None
    """Over plain decoding as it was known when the answer ended."""
    estimated: bool = False
    """Whether that was a short timing, no race."""
    trace: str = ""
    """Which round said what, for ``Trace.decode``; empty where it was not kept."""

    @property
    def can_go_on(self) -> bool:
        """Whether the model was cut off and its ids are known."""
        cut = ("cancelled", "length", "context", "interrupted", "error")
        return self.end in cut and bool(self.tokens)


@dataclass(slots=True)
class Version:
    """A user message and the answer it got; None while there is none."""

    user: str
    answer: Answer | None = None


@dataclass(slots=True)
class Turn:
    """One exchange. Regenerating or editing adds a version and shows it."""

    versions: list[Version]
    shown: int = 0

    @property
    def current(self) -> Version:
        """The version on screen and in the prompt."""
        return self.versions[self.shown]

    @property
    def failed(self) -> bool:
        """Whether the engine broke off before it had said anything."""
        answer = self.current.answer
        return answer is not None and answer.end == "error" and not answer.text


@dataclass(slots=True)
class Conversation:
    """A system prompt and turns."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    left_out: int = 0
    """Turns from the front that requests leave out, as the context has no room for them."""

    @property
    def title(self) -> str:
        """The first user message in one line; empty before there is one."""
        return " ".join(self.turns[0].versions[0].user.split())[:60] if self.turns else ""

    def messages(self, *, whole: bool = False) -> list[dict[str, str]]:
        """The request for the next answer: thinking is left out, and earlier turns that failed
        before a word was said.

        Args:
            whole: with the turns that requests leave out.
        """
        result = [{"role": "system", "content": self.system}] if self.system.strip() else []
        for turn in self.turns if whole else self.turns[self.left_out :]:
            if turn.failed and turn is not self.turns[-1] and not whole:
                continue  # a model that sees unanswered questions leaves the next one unanswered
            result.append({"role": "user", "content": turn.current.user})
            answer = turn.current.answer
            if answer is not None and (answer.text or turn is not self.turns[-1]):
                result.append({"role": "assistant", "content": answer.text})
        return result


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How answers are made; changes hold from the next answer on."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    thinking: bool | None = None
    """None leaves the template's default."""
    block: int | None = None
    """Rows per verify; 0 is plain decoding, None follows what pays."""
    drop_oldest: bool = False
    """Make room by itself when the context runs full."""


class Record(Protocol):
    """Where a chat writes what happens, as it happens."""

    def user(self, turn: int, version: int, text: str) -> None:
        """A user message was sent."""
        ...

    def text(self, turn: int, version: int, channel: Channel, text: str) -> None:
        """A piece of the running answer came."""
        ...

    def answer(self, turn: int, version: int, answer: Answer) -> None:
        """The answer ended."""
        ...

    def show(self, turn: int, version: int) -> None:
        """Another version is shown."""
        ...

    def cut(self, turns: int) -> None:
        """Only the first ``turns`` turns remain."""
        ...

    def left_out(self, turns: int) -> None:
        """Requests leave the first ``turns`` turns out."""
        ...

    def system(self, text: str) -> None:
        """The system prompt changed."""
        ...


class Chat:
    """A conversation with an engine.

    The methods that answer return an iterator; the conversation holds the finished or partial
    answer once the iterator has ended, raised or been closed.
    """

    def __init__(
        self,
        engine: Answers,
        conversation: Conversation | None = None,
        *,
        options: ChatOptions | None = None,
        model: str = "",
        record: Record | None = None,
    ) -> None:
        self.engine = engine
        self.conversation = conversation or Conversation()
        self.options = options or ChatOptions()
        self.model = model
        self.record = record
        self.plain_tok_s: float | None = None
        """Speed of plain decoding for this pair, where known."""
        self.estimated = True
        """Whether it comes from a short timing."""

    @property
    def last(self) -> Answer | None:
        """The answer of the last turn."""
        turns = self.conversation.turns
        return turns[-1].current.answer if turns else None

    def send(self, text: str) -> Iterator[Event]:
        """Answer a new user message."""
        text = whole(text)
        self.conversation.turns.append(Turn([Version(text)]))
        return self._begin(text)

    def retry(self) -> Iterator[Event]:
        """Answer the last user message once more; the earlier answer stays as a version."""
        return self.edit(self._last_turn().current.user)

    def edit(self, text: str) -> Iterator[Event]:
        """Answer the last user message as if it had been ``text``."""
        turn, text = self._last_turn(), whole(text)
        if turn.current.answer is None:
            turn.current.user = text
        else:
            turn.versions.append(Version(text))
            turn.shown = len(turn.versions) - 1
        return self._begin(text)

    def go_on(self) -> Iterator[Event]:
        """Let the last answer go on where it was cut off; out of a full context after making room.

        Raises:
            OptionError: it was not cut off.
            ContextFull: the last turn alone fills the context.
        """
        answer = self._last_turn().current.answer
        if answer is None or not answer.can_go_on:
            raise OptionError("The last answer is complete.", "Send a message instead.")
        if answer.model != self.model:
            raise OptionError(
                f"The last answer is by {answer.model or 'another model'}, this is {self.model}.",
                "Regenerate it instead.",
            )
        if answer.end == "context" and not self.make_room():
            raise ContextFull(
                "The last turn alone fills the context.",
                "Start a new chat, or load with a larger context.",
            )
        return self._answer(answer)

    def make_room(self) -> int:
        """Leave the oldest turns out of requests until a third of the context is free.

        They stay in the conversation. The system prompt and the last turn are never left out.

        Returns:
            How many turns more than before are left out; 0 when there was only the last one.
        """
        conversation, before = self.conversation, self.conversation.left_out
        answer = self._last_turn().current.answer
        said = () if answer is None else answer.tokens
        while conversation.left_out < len(conversation.turns) - 1:
            conversation.left_out += 1
            if self._free(self._prompt(said)) >= _FREED:
                break
        if conversation.left_out > before and self.record is not None:
            self.record.left_out(conversation.left_out)
        return conversation.left_out - before

    def show(self, version: int) -> None:
        """Show another version of the last turn, from 0; out of range is ignored."""
        turn = self._last_turn()
        if 0 <= version < len(turn.versions):
            turn.shown = version
            if self.record is not None:
                self.record.show(len(self.conversation.turns) - 1, version)

    def cut(self, turns: int) -> None:
        """Drop every turn after the first ``turns``."""
        del self.conversation.turns[turns:]
        if self.conversation.left_out >= turns:
            self.conversation.left_out = 0
        if self.record is not None:
            self.record.cut(turns)

    def set_system(self, text: str) -> None:
        """Change the system prompt, from the next answer on."""
        text = whole(text)
        self.conversation.system = text
        if self.record is not None:
            self.record.system(text)

    def _last_turn(self) -> Turn:
        if not self.conversation.turns:
            raise OptionError("There is no message yet.", "Send one first.")
        return self.conversation.turns[-1]

    def _place(self) -> tuple[int, int]:
        turns = self.conversation.turns
        return len(turns) - 1, turns[-1].shown

    def _begin(self, text: str) -> Iterator[Event]:
        if self.record is not None:
            self.record.user(*self._place(), text)
        return self._answer(Answer())

    def _request(self, before: Answer) -> Prompt:
        prompt = self._prompt(before.tokens)
        if self.options.drop_oldest and self._free(prompt) < _LOW and self.make_room():
            prompt = self._prompt(before.tokens)
        return prompt

    def _prompt(self, said: tuple[int, ...]) -> Prompt:
        messages = self.conversation.messages()
        if messages[-1]["role"] == "assistant":
            messages.pop()
        return replace(self.engine.prompt(messages, self.options.thinking), said=said)

    def _free(self, prompt: Prompt) -> float:
        """The part of the context that a prompt leaves free; negative where it does not fit."""
        return 1.0 - (len(prompt.ids) + len(prompt.said)) / self.engine.info.context

    def _answer(self, before: Answer) -> Iterator[Event]:
        """The one task: answer, or go on after ``before``."""
        place = self._place()
        version = self._last_turn().current
        said: dict[Channel, list[str]] = {"answer": [before.text], "think": [before.thinking]}
        answer = replace(before, model=self.model, end="interrupted", error="")
        tokens = list(before.tokens)
        trace = Trace.decode(before.trace, before.text)
        try:
            for event in self.engine.stream(
                self._request(before), self.options.sampling, block=self.options.block
            ):
                if isinstance(event, Resumed):
                    said = {"answer": [event.text], "think": [event.thinking]}
                    trace = Trace.decode(before.trace, event.text)
                elif isinstance(event, Text | Round):
                    trace.add(event)
                if isinstance(event, Text):
                    for piece in event.pieces:
                        said[piece.channel].append(piece.text)
                        if self.record is not None:
                            self.record.text(*place, piece.channel, piece.text)
                elif isinstance(event, Done):
                    answer = replace(
                        answer,
                        end=event.reason,
                        tokens=(*tokens, *event.tokens),
                        usage=event.usage,
                        stats=event.stats,
                        speedup=self._speedup(event),
                        estimated=self.estimated,
                    )
                yield event
        except DflashError as error:
            answer = replace(answer, end="error", error=str(error))
            raise
        finally:
            answer = replace(
                answer,
                text="".join(said["answer"]),
                thinking="".join(said["think"]),
                trace=trace.encode(),
            )
            version.answer = answer
            if self.record is not None:
                self.record.answer(*place, answer)

    def _speedup(self, done: Done) -> float | None:
        if not self.plain_tok_s or not done.stats.tok_s:
            return None
        return done.stats.tok_s / self.plain_tok_s
