"""From messages to ids: what the engine needs of a tokenizer, and what a request may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_local.errors import OptionError
from dflash_local.text import ThinkTags

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""


class ChatTokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, special tokens in it recognised, none added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out, incomplete bytes as U+FFFD."""
        ...

    def render(self, messages: Sequence[Message], thinking: bool | None) -> str:
        """The chat template filled up to where the assistant begins to write.

        ``thinking`` is handed to templates that know it; None leaves the template's default.
        """
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn, besides those of the target's generation config."""
        ...

    @property
    def tags(self) -> ThinkTags | None:
        """How the model marks thinking; None where it does not think."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's ids, and whether they end inside thinking."""

    ids: tuple[int, ...]
    in_thinking: bool = False
    said: tuple[int, ...] = ()
    """Ids of the reply so far, where one that was cut off is to go on."""


def check_ids(ids: Sequence[object], vocab_size: int) -> None:
    """Refuse what the target has no embedding for.

    Raises:
        OptionError: an id is no whole number within the vocabulary.
    """
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise OptionError(f"Token id {item!r} is outside the vocabulary of {vocab_size}.")


def build_prompt(
    tokenizer: ChatTokenizer,
    vocab_size: int,
    messages: Sequence[Message] | Sequence[int] | str,
    thinking: bool | None = None,
) -> Prompt:
    """The ids of a request: messages through the chat template, text as one user message.

    Raises:
        OptionError: nothing to answer, an unknown role, or an id outside the vocabulary.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, bytes):  # a sequence of ints too, but never meant as ids
        raise OptionError("A message is given as bytes.", "Decode it first.")
    if not messages:
        raise OptionError("There is no message to answer.", "Give at least one.")
    ids = [item for item in messages if isinstance(item, int)]
    if len(ids) == len(messages):
        check_ids(ids, vocab_size)
        return Prompt(tuple(ids))
    chat = [item for item in messages if isinstance(item, Mapping)]
    for message in chat:
        if message.get("role") not in ("system", "user", "assistant") or not isinstance(
            message.get("content"), str
        ):
            raise OptionError(
                f"Not a chat message: {message!r}.",
                'Give {"role": "system", "user" or "assistant", "content": text}.',
            )
    if len(chat) != len(messages):
        raise OptionError("Messages and token ids are mixed.", "Give one or the other.")
    text = whole(tokenizer.render(chat, thinking))
    tags = tokenizer.tags
    return Prompt(
        tuple(tokenizer.encode(text)),
        in_thinking=tags is not None and text.rstrip().endswith(tags.open),
    )


def whole(text: str) -> str:
    """Halves of surrogate pairs, which no tokenizer can encode, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
