"""PromptHistory: what the user sent before, across chats, newest last."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from dflash_local.paths import data_dir
from dflash_local.private import open_private

KEPT = 500
_LONGEST = 20_000
"""Characters; longer prompts are not remembered."""


class PromptHistory:
    """Earlier prompts and a place among them; the unsent text is the newest entry."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or data_dir() / "prompts.jsonl"
        self._entries = self._read()
        self._at = len(self._entries)
        self._unsent = ""

    def add(self, text: str) -> None:
        """Remember a prompt that was sent; saving is worth no error."""
        if text.strip() and len(text) <= _LONGEST and self._entries[-1:] != [text]:
            self._entries = [*self._entries, text][-KEPT:]
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                handle = open_private(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                with open(handle, "a", encoding="utf-8") as file:
                    file.write(json.dumps(text) + "\n")
        self._at = len(self._entries)
        self._unsent = ""

    def move(self, direction: int, current: str) -> str | None:
        """The prompt before (-1) or after (1) the current place; None at the ends."""
        target = self._at + direction
        if not 0 <= target <= len(self._entries):
            return None
        if self._at == len(self._entries):
            self._unsent = current
        self._at = target
        return self._unsent if target == len(self._entries) else self._entries[target]

    def _read(self) -> list[str]:
        entries: list[str] = []
        with suppress(OSError):
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):
                    entry = json.loads(line)
                    if isinstance(entry, str):
                        entries.append(entry)
        return entries[-KEPT:]
