"""Drives the app in tests: a scripted pair in a real engine process, waiting without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from textual.pilot import Pilot

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.service import Service
from dflash_local.tui.app import DflashApp, Options
from dflash_local.tui.chat_screen import ChatScreen
from dflash_local.tui.reply import Reply

PATIENCE = 30.0
"""Seconds after which a wait has failed; generous, for loaded machines."""


@dataclass
class Driver:
    """A running app."""

    app: DflashApp
    pilot: Pilot[int]

    @property
    def screen(self) -> ChatScreen:
        screen = self.app.chat_screen
        assert isinstance(screen, ChatScreen)
        return screen

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait until something holds."""
        end = monotonic() + PATIENCE
        while not condition():
            assert monotonic() < end, f"waited in vain {what}"
            await asyncio.sleep(0.02)
        await self.pilot.pause()

    async def ready(self) -> None:
        await self.until(lambda: self.screen.info is not None, "for the load")

    async def gone(self) -> None:
        """Wait until the app has closed; the pilot would wait for widgets that are gone."""
        end = monotonic() + PATIENCE
        while self.app.is_running:
            assert monotonic() < end, "waited in vain for the app to close"
            await asyncio.sleep(0.02)

    async def idle(self) -> None:
        await self.until(lambda: not self.screen.generating and not self.screen.queued, "for idle")

    async def say(self, text: str) -> None:
        """Type a message, send it, wait for the whole answer."""
        await self.send(text)
        await self.idle()

    async def send(self, text: str) -> None:
        self.screen.prompt.set_text(text)
        await self.pilot.press("enter")
        await self.pilot.pause()

    async def generating(self, rounds: int = 2) -> None:
        """Wait until an answer is well on its way."""
        await self.until(
            lambda: (
                self.screen.generating and self.screen.answering.stats.summary().rounds >= rounds
            ),
            "for rounds",
        )

    def replies(self) -> list[Reply]:
        return list(self.screen.query(Reply))

    def shown(self) -> str:
        """Everything on the screen, as text."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text for strip in strips)

    def told(self, part: str) -> bool:
        """Whether a notification with these words was shown."""
        return any(part in note.message for note in self.app._notifications)

    def words(self) -> str:
        """The same as one line, so that wrapping does not matter."""
        return " ".join(self.shown().replace("▌", " ").split())


@asynccontextmanager
async def chat(
    opener: ScriptedOpener | None = None,
    *,
    size: tuple[int, int] = (100, 30),
    options: Options | None = None,
    wait: bool = True,
    notifications: bool = False,
) -> AsyncIterator[Driver]:
    """A chat on a scripted pair."""
    with Service(opener or ScriptedOpener()) as service:
        app = DflashApp(service, "scripted", options)
        async with app.run_test(size=size, notifications=notifications) as pilot:
            driver = Driver(app, pilot)
            if wait:
                await driver.ready()
            yield driver
