"""The target's tokenizer and chat template, through transformers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_local.errors import OptionError, WeightsError
from dflash_local.prompting import Message
from dflash_local.text import ThinkTags
from dflash_local.weights import read_json, refuse_own_code


class HubTokenizer:
    """A tokenizer folder in the format of the Hugging Face hub; what the engine needs of it.

    Raises:
        WeightsError: the files are missing, damaged, or want to run code of their own.
    """

    def __init__(self, folder: Path) -> None:
        import transformers

        refuse_own_code(read_json(folder / "config.json"), folder)
        settings = folder / "tokenizer_config.json"
        if settings.is_file():
            refuse_own_code(read_json(settings), folder)
        # What the library remarks about a config is said by the backend, in one line.
        heard = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        try:
            self._inner: Any = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # the readers of damaged files raise all sorts
            raise WeightsError(
                f"The tokenizer in {folder} cannot be read: {error}", "Pull the model again."
            ) from error
        finally:
            transformers.logging.set_verbosity(heard)
        # Requests are encoded on their callers' threads while the engine's thread decodes, and
        # an encoding may set options of the shared tokenizer.
        self._lock = threading.Lock()
        template = self._inner.chat_template or ""
        thinks = "<think>" in str(template) or "<think>" in self._inner.get_vocab()
        self.tags: ThinkTags | None = ThinkTags() if thinks else None
        end = self._inner.eos_token_id
        self.stop_ids: tuple[int, ...] = () if end is None else (int(end),)
        self.special_ids: tuple[int, ...] = tuple(
            sorted(i for i, token in self._inner.added_tokens_decoder.items() if token.special)
        )
        """Ids that are no text."""

    def encode(self, text: str) -> list[int]:
        """Ids of text, special tokens in it recognised, none added."""
        with self._lock:
            ids: list[int] = self._inner.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out, incomplete bytes as U+FFFD."""
        with self._lock:
            text: str = self._inner.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text

    def render(self, messages: Sequence[Message], thinking: bool | None) -> str:
        """The chat template up to where the assistant begins to write.

        Raises:
            OptionError: there is no template, or it refuses these messages.
        """
        if not self._inner.chat_template:
            raise OptionError(
                "This model has no chat template.", "Give token ids, or choose a chat model."
            )
        extra = {} if thinking is None else {"enable_thinking": thinking}
        try:
            text: str = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **extra,
            )
        except Exception as error:  # templates raise whatever their author chose
            raise OptionError(f"The chat template refuses these messages: {error}") from error
        return text
