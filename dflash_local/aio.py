"""``astream`` and ``acomplete``: an engine's answers for asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

from dflash_local.engine import Engine
from dflash_local.events import Event
from dflash_local.prompting import Message, Prompt
from dflash_local.reply import Reply, reply_of
from dflash_local.sampling import SamplingParams


async def astream(
    engine: Engine,
    messages: Sequence[Message] | Sequence[int] | str | Prompt,
    sampling: SamplingParams | None = None,
    *,
    block: int | None = None,
    thinking: bool | None = None,
    reuse: bool = True,
) -> AsyncIterator[Event]:
    """``Engine.stream`` without blocking the event loop; arguments and errors are the same.

    Leaving the loop early, or cancelling the task, stops the answer after its current round.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
    left = threading.Event()

    def post(item: Event | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(arrived.put_nowait, item)

    def pump() -> None:
        try:
            for event in engine.stream(
                messages, sampling, block=block, thinking=thinking, reuse=reuse
            ):
                if left.is_set():
                    break
                post(event)
        except BaseException as error:  # raised again where the events are read
            post(error)
        else:
            post(None)

    threading.Thread(target=pump, name="dflash-astream", daemon=True).start()
    try:
        while (item := await arrived.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        left.set()


async def acomplete(
    engine: Engine,
    messages: Sequence[Message] | Sequence[int] | str | Prompt,
    sampling: SamplingParams | None = None,
    *,
    block: int | None = None,
    thinking: bool | None = None,
    reuse: bool = True,
) -> Reply:
    """``Engine.complete`` without blocking the event loop; cancelling works as for ``astream``."""
    return reply_of(
        [
            event
            async for event in astream(
                engine, messages, sampling, block=block, thinking=thinking, reuse=reuse
            )
        ]
    )
