"""Pictures of the chat at three widths, to be looked at when they change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from textual.pilot import Pilot

from dflash_local.backend import MemoryFigures
from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.chat import Answer, Conversation, Turn, Version
from dflash_local.events import Round, Usage
from dflash_local.service import Service
from dflash_local.stats import DraftStats
from dflash_local.tui.app import DflashApp
from dflash_local.tui.loader import Loader
from dflash_local.tui.loading import LoadingCard
from dflash_local.tui.ribbon import Cell

REPLY = """Speculative decoding drafts several tokens and checks them at once:

1. the **draft** proposes a block,
2. the *target* verifies it in one pass.

```python
def accept(drafted, verified):
    return [d for d, v in zip(drafted, verified) if d == v]
```
"""


def fixed() -> tuple[DraftStats, list[Cell], Conversation]:
    stats, cells = DraftStats(), list[Cell]()
    for n in range(60):
        accepted = (3, 7, 0, 5, 1)[n % 5]
        round_ = Round(n, 7, accepted, tuple(range(accepted + 1)), 25.0, 5.0, 18.0, 400 + n)
        stats.add(round_)
        cells.append(Cell(accepted + 1, 7, accepted))
    summary = stats.summary()
    usage = Usage(412, 380, 252, 0, 310.0, summary.decode_ms)
    answer = Answer(REPLY, "", "stop", "pair", (1,) * 252, usage, summary, "", 3.1)
    turn = Turn([Version("What is speculative decoding?", answer)])
    return stats, cells, Conversation(turns=[turn])


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[DflashApp]:
    # The load's own messages carry times that differ from run to run.
    monkeypatch.setattr(Loader, "start", lambda self: None)
    with Service(ScriptedOpener()) as service:
        yield DflashApp(service, "pair")


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_chat_looks_as_before(app: DflashApp, width: int, snap_compare: Any) -> None:
    async def before(pilot: Pilot[int]) -> None:
        screen = app.chat_screen
        while not screen.query(LoadingCard):
            await pilot.pause(0.02)
        stats, cells, conversation = fixed()
        screen.chat.conversation = conversation
        screen.prompt.cursor_blink = False
        await screen.transcript.show(conversation)
        screen.load.info = await asyncio.to_thread(screen.service.wait)
        screen.live.loaded(screen.load.info, None)
        screen.answering.stats = stats
        screen.answering.cells.extend(cells)
        screen.live.plain_tok_s = 45.9
        screen.live.estimated = False
        screen.live.progressed(None, (Round(60, 7, 3, (1, 2), 25.0, None, None, 664),))
        held = MemoryFigures(5_100_000_000, 900_000_000, 1_200_000_000, 9_800_000_000, 0)
        screen.live.remember(held)
        if width >= 100:  # over the chat, and with room of its own at 160
            await pilot.press("ctrl+s", "ctrl+s")
        await pilot.pause()

    assert snap_compare(app, terminal_size=(width, 40), run_before=before)
