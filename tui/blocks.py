"""Where the top-level Markdown blocks of a growing text begin.

Only places that are surely a boundary count: it is harmless to take two blocks for one, but
cutting one in two would change what is shown.
"""

from __future__ import annotations

import re

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
_LIST = re.compile(r"^(?:[-*+]|\d{1,9}[.)])(?:\s|$)")
_UNDECIDED = 12
"""Characters of a line after which its kind is known, list markers being short."""

_UNSURE = "\0"
"""A fence that no line closes."""


class BlockScanner:
    """Reads a text in pieces and finds its boundaries."""

    def __init__(self) -> None:
        self.open_start = 0
        """Where the last block begins."""
        self.in_fence = False
        """Whether the text ends inside a code fence."""
        self._length = 0
        self._line = ""
        """The unfinished last line."""
        self._fence = ""
        self._indent = 0
        """Of the open fence."""
        self._list = False
        self._blank = True
        self._closed = True
        """Whether the last block surely ended before the current line."""
        self._decided = False

    def push(self, text: str) -> list[int]:
        """Read on; the offsets, in the whole text, at which new blocks turned out to begin."""
        starts: list[int] = []
        for part in text.splitlines(keepends=True) if text else ():
            self._line += part
            self._length += len(part)
            complete = part.endswith("\n")
            self._begin_line(complete, starts)
            if complete:
                self._end_line()
        return starts

    def _begin_line(self, complete: bool, starts: list[int]) -> None:
        line = self._line
        if self._decided or not (complete or len(line) >= _UNDECIDED):
            return
        self._decided = True
        if self._fence or not line.strip():
            return
        is_list = _LIST.match(line) is not None
        apart = self._closed or (
            self._blank and not line[0].isspace() and not (self._list and is_list)
        )
        if apart:
            start = self._length - len(line)
            if start > self.open_start:
                starts.append(start)
            self.open_start = start
            self._list = is_list
        self._closed = False

    def _end_line(self) -> None:
        line = self._line.rstrip("\n")
        self._list = self._list or (not self._fence and _LIST.match(line) is not None)
        fence = _FENCE.match(line)
        indent = len(line) - len(line.lstrip(" "))
        if self._fence and self._list and line.strip() and indent < self._indent:
            # It may end the list, and the fence with it: nothing is sure from here on.
            self._fence = _UNSURE
        elif fence is not None and (len(fence[1]) <= 3 or self._list):
            mark, rest = fence[2], fence[3]
            if not self._fence:
                self._fence = "" if mark[0] == "`" and "`" in rest else mark
                self._indent = len(fence[1])
            elif (
                mark.startswith(self._fence)
                and not rest.strip()
                and len(fence[1]) <= self._indent + 3
                # Further left may be outside the list, where it would open another fence.
                and (not self._list or len(fence[1]) >= self._indent)
            ):
                self._fence = ""
                # A fence inside a list belongs to it.
                self._closed = not self._list
        self._blank = not line.strip()
        self.in_fence = bool(self._fence)
        self._line, self._decided = "", False
