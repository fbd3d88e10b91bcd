"""Answering: one answer from its request to its end, at the screen's pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Protocol

from dflash_local.events import Event, Prefill, Round, Text, Usage
from dflash_local.stats import DraftStats

from .client import Client, Update
from .reply import Reply
from .ribbon import Cell

PERIOD = 0.11
"""Seconds between redraws while text comes."""
SLOW_PERIOD = 0.25
"""The same when a redraw takes long, or over a slow line."""
BUSY = 0.04
"""Seconds of one redraw above which they get rarer."""
UNSEEN_PERIOD = 0.5
"""Seconds between additions of text while the user reads further up."""
_CELLS = 400


class Audience(Protocol):
    """What the answer needs of the screen."""

    @property
    def following(self) -> bool:
        """Whether the end of the chat is in view."""
        ...

    def progressed(self, prefill: Prefill | None, rounds: tuple[Round, ...]) -> None:
        """Figures have changed."""
        ...

    def waited(self) -> None:
        """The answer runs on; called before every look at it."""
        ...

    async def answered(self, reply: Reply, update: Update) -> None:
        """The answer ended; its text is all shown."""
        ...


class Answering:
    """Takes what the client has and shows it, until the answer ends."""

    def __init__(self, audience: Audience, *, low_bandwidth: bool = False) -> None:
        self.stats = DraftStats()
        self.cells: deque[Cell] = deque(maxlen=_CELLS)
        self.usage: Usage | None = None
        """Of the last finished answer."""
        self.reply: Reply | None = None
        """Where the running answer goes; None while there is none."""
        self._audience = audience
        self._client = Client()
        self._period = SLOW_PERIOD if low_bandwidth else PERIOD
        self._texts: list[Text] = []
        self._rounds: list[Round] = []
        self._shown_at = 0.0

    def forget(self) -> None:
        """Let go of the figures of the last answer."""
        self.stats = DraftStats()
        self.usage = None
        self.cells.clear()

    async def run(self, make: Callable[[], Iterator[Event]], reply: Reply) -> None:
        """Show an answer until it ends."""
        self.reply = reply
        self.stats = DraftStats()
        self.usage = None
        self._client.start(make)
        while True:
            began = monotonic()
            self._audience.waited()
            update = self._client.take()
            await self._apply(reply, update)
            if update.ended:
                break
            took = monotonic() - began
            period = SLOW_PERIOD if took > BUSY else self._period
            await asyncio.sleep(max(0.02, period - took))
        self.reply = None
        await self._audience.answered(reply, update)

    async def _apply(self, reply: Reply, update: Update) -> None:
        self.stats.add_all(update.rounds)
        self.cells.extend(Cell(len(r.tokens), r.depth, r.accepted) for r in update.rounds)
        if update.done is not None:
            self.usage = update.done.usage
        self._texts.extend(update.texts)
        self._rounds.extend(update.rounds)
        now = monotonic()
        unseen = not self._audience.following and now - self._shown_at < UNSEEN_PERIOD
        if self._texts and (update.ended or not unseen):
            self._shown_at = now
            texts, self._texts = self._texts, []
            rounds, self._rounds = self._rounds, []
            await reply.write(texts, rounds)
        if update.rounds or update.prefill is not None:
            self._audience.progressed(update.prefill, update.rounds)
