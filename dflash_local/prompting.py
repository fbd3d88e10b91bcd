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
    if not messages:
        raise OptionError("There is no message to answer.", "Give at least one.")
    ids = [item for item in messages if isinstance(item, int)]
    if len(ids) == len(messages):
        bad = next((i for i in ids if not 0 <= i < vocab_size), None)
        if bad is not None:
            raise OptionError(f"Token id {bad} is outside the vocabulary of {vocab_size}.")
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
    text = tokenizer.render(chat, thinking)
    tags = tokenizer.tags
    return Prompt(
        tuple(tokenizer.encode(text)),
        in_thinking=tags is not None and text.rstrip().endswith(tags.open),
    )
