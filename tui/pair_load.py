"""PairLoad: the pair that the engine loads or has loaded, from the first step to ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dflash_local.backend import BackendInfo, MemoryFigures
from dflash_local.errors import DflashError, NotDownloaded
from dflash_local.events import Event, LoadProgress
from dflash_local.service_wire import ServiceOpener

from . import figures
from .loader import Loader
from .loading import LOADED, LoadingCard
from .transcript import Note

if TYPE_CHECKING:
    from .chat_screen import ChatScreen


class PairLoad:
    """Shows the load in the transcript, and hears from the loader how it goes."""

    def __init__(self, screen: ChatScreen) -> None:
        self.info: BackendInfo | None = None
        """What is loaded; None while nothing is."""
        self.loader = Loader(screen.service, screen, self)
        self.waiting: Callable[[], Iterator[Event]] | None = None
        """The answer to begin once it is ready."""
        self._screen = screen
        self._before: MemoryFigures | None = None
        """What the engine held before the pair was switched."""

    async def watch(self) -> None:
        """Show the progress of the load that is going on."""
        screen = self._screen
        self.info = None
        self.loader.leave()
        await screen.transcript.add(LoadingCard(screen.pair))
        screen.live.loading(screen.pair)
        self.loader = Loader(screen.service, screen, self)
        self.loader.start()

    async def reload(self, opener: ServiceOpener | None = None) -> None:
        """Start the engine process anew, perhaps with another pair."""
        self._before = self._screen.live.memory
        self._screen.service.reload(opener)
        await self.watch()

    def step(self, progress: LoadProgress) -> None:
        """The load got further."""
        if progress.stage == LOADED:
            return
        for card in self._screen.query(LoadingCard):
            card.show(progress)

    async def loaded(self, info: BackendInfo, seconds: float) -> None:
        """The pair is ready."""
        screen = self._screen
        await screen.query(LoadingCard).remove()
        await screen.query(".loaded").remove()
        draft = f" with {info.draft}" if info.draft else ", no draft"
        where = f"{info.backend} on {info.device}"
        words = f"Ready: {info.target}{draft} · {where} · {figures.seconds(seconds)}"
        await screen.transcript.mount(Note(words, classes="loaded"), before=0)
        screen.live.loaded(info, screen.chat.last)
        # Last, so that nothing that is typed meanwhile goes before what waits.
        self.info = info
        make, self.waiting = self.waiting, None
        if make is not None and not screen.generating:
            screen.answer(make, len(screen.chat.conversation.turns) - 1)
        else:
            await screen.send_next()

    async def failed(self, error: DflashError) -> None:
        """It could not be loaded: say why, and offer others where it is not here."""
        screen = self._screen
        await screen.query(LoadingCard).remove()
        screen.live.loading(screen.pair, "not loaded")
        await screen.transcript.add(Note(str(error), classes="error"))
        if isinstance(error, NotDownloaded):
            await screen.perform("model.choose", "")

    def timed(self, tok_s: float, *, estimated: bool = True) -> None:
        """Plain decoding was timed on this machine."""
        self._screen.chat.plain_tok_s = self._screen.live.plain_tok_s = tok_s
        self._screen.chat.estimated = self._screen.live.estimated = estimated

    def remember(self, memory: MemoryFigures) -> None:
        """What the engine holds now; compared with before where the pair was switched."""
        before, self._before = self._before, None
        self._screen.live.remember(memory)
        if before is not None and before.peak:
            words = f"Memory: {figures.gigabytes(before.peak)} before, "
            self._screen.tell(words + f"{figures.gigabytes(memory.peak)} now.")
