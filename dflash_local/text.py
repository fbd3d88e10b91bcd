"""Ids to text, one reply at a time: characters, stop strings, thinking and answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_local.events import Channel, Origin, Piece

Decode = Callable[[Sequence[int]], str]
"""Text of ids, special tokens left out, incomplete bytes as U+FFFD."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WAIT = 64
"""Ids without one complete character after which the bytes are taken for broken altogether."""


class Detokenizer:
    """Incremental decoding: the pieces of a reply join to the decoding of all its ids.

    Only the ids since the last complete character are decoded again, behind a few settled ones
    that give decoders with leading-space rules their context.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._settled: list[int] = []
        self._open: list[int] = []
        self._shown = ""
        """Text of the open ids that was released already."""

    def push(self, token: int) -> str:
        """Text that ``token`` completes; a tail that may still change is held."""
        self._open.append(token)
        text = self._open_text()
        # All marks at the end are held, not only the last: decoders with byte fallback write one
        # per byte, for a whole run of bytes, until the run is valid.
        ready = text.rstrip(_INCOMPLETE)
        if ready == text or len(self._open) > _LONGEST_WAIT:
            return self._settle(text)
        piece = ready[len(self._shown) :]
        self._shown = max(self._shown, ready, key=len)
        return piece

    def flush(self) -> str:
        """Whatever is held, broken bytes as U+FFFD."""
        return self._settle(self._open_text()) if self._open else ""

    def _open_text(self) -> str:
        before = self._decode(self._settled)
        return self._decode(self._settled + self._open)[len(before) :]

    def _settle(self, text: str) -> str:
        piece = text[len(self._shown) :]
        # Ids without text (special tokens) are no context for the next ones, so keep the older.
        self._settled = self._open if text else self._settled + self._open
        self._open, self._shown = [], ""
        return piece


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The strings that a template puts around thinking."""

    open: str = "<think>"
    close: str = "</think>"


class ReplyText:
    """Reads the ids of one reply into pieces: the loop's reader.

    Works on characters, so a tag or a stop string may lie anywhere in a block. Text that may turn
    out to be the start of one is held back.

    Args:
        decode: ids to text.
        stops: strings that end the reply; neither they nor what follows is text of it.
        tags: how thinking is marked; None where the model does not think.
        channel: where the reply starts, ``think`` when the prompt ends inside thinking.
    """

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        tags: ThinkTags | None = None,
        channel: Channel = "answer",
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = tuple(stops)
        self._tags = tags
        self._channel: Channel = channel
        self._held: list[tuple[str, Origin]] = []
        self._pieces: list[Piece] = []
        self._last_origin: Origin = "first"
        self._stopped = False
        self._trim = False
        self._begun = False
        self.thinking_tokens = 0
        """Ids read while the reply was thinking, the closing tag's included."""

    def push(self, token: int, origin: Origin) -> bool:
        """Read one id; True when it completes a stop string."""
        self.thinking_tokens += self._channel == "think"
        self._last_origin = origin
        self._read(self._detokenizer.push(token), origin)
        return self._stopped

    def pieces(self) -> tuple[Piece, ...]:
        """Text released since the last call, neighbours of one origin and channel joined."""
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    def flush(self) -> tuple[Piece, ...]:
        """Text still held back, at the end of the reply."""
        if not self._stopped:
            self._read(self._detokenizer.flush(), self._last_origin)
            if not self._stopped:
                self._release(sum(len(text) for text, _ in self._held))
        return self.pieces()

    def _markers(self) -> tuple[str, ...]:
        if self._tags is not None and self._channel == "think":
            return (*self._stops, self._tags.close)
        # Thinking opens a reply; the same characters later are text about it.
        if self._tags is not None and not self._begun:
            return (*self._stops, self._tags.open)
        return self._stops

    def _read(self, text: str, origin: Origin) -> None:
        if text:
            self._held.append((text, origin))
        while True:
            held = "".join(part for part, _ in self._held)
            found = [(held.find(m), m) for m in self._markers() if m in held]
            if not found:
                self._release(len(held) - _partial(held, self._markers()))
                return
            at, marker = min(found)
            self._release(at)
            if marker in self._stops:
                self._stopped = True
                self._held.clear()
                return
            self._drop(len(marker))
            self._channel = "answer" if self._channel == "think" else "think"
            self._trim = True

    def _drop(self, length: int) -> list[tuple[str, Origin]]:
        """Take ``length`` characters off the front of what is held."""
        taken: list[tuple[str, Origin]] = []
        while length > 0:
            text, origin = self._held.pop(0)
            if len(text) > length:
                self._held.insert(0, (text[length:], origin))
            taken.append((text[:length], origin))
            length -= len(text)
        return taken

    def _release(self, length: int) -> None:
        for text, origin in self._drop(length):
            if self._trim:  # the blank lines around a tag belong to the markup
                text = text.lstrip("\n")
                if not text:
                    continue
                self._trim = False
            self._begun = self._begun or not text.isspace()
            last = self._pieces[-1] if self._pieces else None
            if last and (last.origin, last.channel) == (origin, self._channel):
                self._pieces[-1] = Piece(last.text + text, origin, self._channel)
            else:
                self._pieces.append(Piece(text, origin, self._channel))


def _partial(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
