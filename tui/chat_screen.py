"""ChatScreen: the transcript, the prompt and the status line, and the pace of redrawing."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from typing import ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static
from textual.worker import Worker

from dflash_local.backend import BackendInfo
from dflash_local.chat import Chat, ChatOptions, Conversation
from dflash_local.errors import DflashError, OptionError
from dflash_local.events import Event, Piece
from dflash_local.service import Service
from dflash_local.stats import DraftStats

from . import figures, messages
from .client import Client, Update
from .commands import REGISTRY
from .loader import Loader
from .loading import LoadingCard
from .prompt import Prompt
from .reply import Reply
from .ribbon import Cell
from .status_line import Status, StatusLine
from .transcript import Note, Transcript, UserMessage
from .visible import visible

PERIOD = 0.11
"""Seconds between redraws while text comes."""
SLOW_PERIOD = 0.25
"""The same when a redraw takes long, or over a slow line."""
BUSY = 0.04
"""Seconds of one redraw above which they get rarer."""
UNSEEN_PERIOD = 0.5
"""The same while the user reads further up."""
QUIT_S = 2.0
_CELLS = 400

HINT = "Enter send · Ctrl+J new line · Esc stop · Ctrl+P all commands · Ctrl+C twice quits"


class ChatScreen(Screen[None]):
    """One chat with one service."""

    BINDINGS: ClassVar[list[BindingType]] = [*REGISTRY.bindings("chat")]
    AUTO_FOCUS = "Prompt"
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-narrow"),
        (80, "-normal"),
        (110, "-wide"),
    ]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012

    def __init__(self, service: Service, *, pair: str, low_bandwidth: bool = False) -> None:
        super().__init__()
        self.service = service
        self.pair = pair
        self.chat = Chat(service, model=pair)
        self.client = Client()
        self.loader = Loader(service, self)
        self.info: BackendInfo | None = None
        self.transcript = Transcript()
        self.prompt = Prompt()
        self.status_line = StatusLine()
        self.stats = DraftStats()
        self.cells: deque[Cell] = deque(maxlen=_CELLS)
        self.queued: deque[UserMessage] = deque()
        self._hint = Static(Content(HINT), id="hint")
        self._below = Static(Content("new text below · End"), id="below")
        self._period = SLOW_PERIOD if low_bandwidth else PERIOD
        self._reply: Reply | None = None
        self._waiting: list[Piece] = []
        self._status = Status(state="loading", pair=pair)
        self._quit_armed = 0.0
        self._pump_worker: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        """Transcript above, prompt and status below."""
        yield self.transcript
        yield self._below
        yield self.prompt
        yield self._hint
        yield self.status_line

    async def on_mount(self) -> None:
        """Watch the load."""
        await self.transcript.add(LoadingCard(self.pair))
        self._draw_status()
        self.loader.start()

    # -- state

    @property
    def generating(self) -> bool:
        """An answer is being written."""
        return self._reply is not None

    def focused_reply(self) -> Reply | None:
        """The reply with the focus, else the last one."""
        if isinstance(self.focused, Reply):
            return self.focused
        replies = self.query(Reply)
        return replies.last() if replies else None

    # -- actions

    async def action_run(self, action_id: str) -> None:
        """Run an action of the registry; its errors are told, not raised."""
        action = REGISTRY[action_id]
        await self.perform(action_id, action.argument)

    async def perform(self, action_id: str, argument: str) -> None:
        """Run an action with an argument."""
        try:
            result = REGISTRY[action_id].run(self, argument)
            if inspect.isawaitable(result):
                await result
        except DflashError as error:
            self.tell(str(error), severity="error")

    def tell(self, text: str, *, severity: Literal["information", "error"] = "information") -> None:
        """A passing word to the user."""
        self.app.notify(visible(text), severity=severity, markup=False)

    @on(Prompt.Sent)
    async def _sent(self, event: Prompt.Sent) -> None:
        text = event.text
        if text.startswith("/") and not text.startswith("//"):
            try:
                action, argument = REGISTRY.parse(text)
            except DflashError as error:
                self.prompt.set_text(text)
                self.tell(str(error), severity="error")
                return
            await self.perform(action.id, argument)
            return
        await self.send(text[1:] if text.startswith("//") else text)

    async def send(self, text: str) -> None:
        """Send a message now, or queue it."""
        self.transcript.follow()
        if self.generating or self.info is None:
            message = UserMessage(text, queued=True)
            self.queued.append(message)
            await self.transcript.add(message)
            return
        await self.transcript.add(UserMessage(text))
        await self.answer(lambda: self.chat.send(text))

    async def answer(self, make: Callable[[], Iterator[Event]], reply: Reply | None = None) -> None:
        """Start an answer, in a new reply or going on in one."""
        if self.loader.timing:
            self.service.stop()
        if reply is None:
            reply = Reply()
            await self.transcript.add(reply)
        self._reply = reply
        self.stats = DraftStats()
        self.client.start(make)
        self.transcript.follow()
        self._pump_worker = self.run_worker(self._pump(), group="pump")

    def stop(self) -> None:
        """Stop after the current round."""
        self.service.stop()
        self._set_status(replace(self._status, state="stopping"))

    async def retry(self) -> None:
        """Answer the last message once more."""
        if not self.chat.conversation.turns:
            raise OptionError("There is nothing to regenerate yet.", "Send a message first.")
        if self.generating:
            self.stop()
            await self._pumping()
        replies = self.query(Reply)
        if replies:
            await replies.last().remove()
        if not self.service.alive:
            self.service.reload()
            await self.transcript.add(LoadingCard(self.pair))
            self.info = None
            self.loader.start()
        await self.answer(self.chat.retry)

    async def go_on(self) -> None:
        """Let a stopped answer go on in its place."""
        last = self.chat.last
        replies = self.query(Reply)
        if self.generating or last is None or not last.can_go_on or not replies:
            raise OptionError("There is no stopped reply to continue.")
        await self.answer(self.chat.go_on, replies.last())

    async def new_chat(self) -> None:
        """Begin a new conversation."""
        system = self.chat.conversation.system
        self.chat = Chat(
            self.service, Conversation(system), options=self.chat.options, model=self.pair
        )
        await self.transcript.remove_children()
        self.transcript.follow()

    def set_block(self, argument: str) -> None:
        """Rows per verify from the next answer on."""
        most = self.info.block_size if self.info else 16
        if argument in ("off", "0"):
            block: int | None = 0
        elif argument in ("", "auto"):
            block = None
        elif argument.isdigit() and int(argument) <= most:
            block = int(argument)
        else:
            raise OptionError(f"Not a block size: {argument}.", f"Give 1 to {most}, or off.")
        options = self.chat.options
        self.chat.options = ChatOptions(options.sampling, options.thinking, block)
        self.tell(
            "Plain decoding from the next answer on." if block == 0 else f"Block {block or most}."
        )

    def copy_selection(self) -> bool:
        """Copy what is selected; False where nothing is."""
        text = self.prompt.selected_text if self.prompt.has_focus else ""
        text = text or self.get_selected_text() or ""
        if not text:
            return False
        self.app.copy_to_clipboard(text)
        self.tell(f"Copied {len(text)} characters.")
        self.clear_selection()
        return True

    def arm_quit(self) -> None:
        """Quit at the second press within two seconds."""
        if monotonic() - self._quit_armed < QUIT_S:
            self.app.exit()
            return
        self._quit_armed = monotonic()
        self._hint.update(Content("Press Ctrl+C again to quit"))
        self.set_timer(QUIT_S, lambda: self._hint.update(Content(HINT)))

    # -- the load

    @on(messages.LoadStep)
    def _load_step(self, event: messages.LoadStep) -> None:
        for card in self.query(LoadingCard):
            card.show(event.progress)

    @on(messages.Loaded)
    async def _loaded(self, event: messages.Loaded) -> None:
        self.info = info = event.info
        await self.query(LoadingCard).remove()
        draft = f" with {info.draft}" if info.draft else ", no draft"
        where = f"{info.backend} on {info.device}"
        await self.transcript.mount(
            Note(f"Ready: {info.target}{draft} · {where} · {figures.seconds(event.seconds)}"),
            before=0,
        )
        self._set_status(
            replace(self._status, state="ready", context=info.context, block=info.block_size)
        )
        await self._next()

    @on(messages.LoadFailed)
    async def _load_failed(self, event: messages.LoadFailed) -> None:
        await self.query(LoadingCard).remove()
        await self.transcript.add(Note(str(event.error), classes="error"))
        self._set_status(replace(self._status, state="not loaded"))

    @on(messages.PlainSpeed)
    def _plain_speed(self, event: messages.PlainSpeed) -> None:
        self.chat.plain_tok_s = event.tok_s

    @on(messages.MemoryRead)
    def _memory_read(self, event: messages.MemoryRead) -> None:
        self._set_status(replace(self._status, memory=event.memory.peak))

    # -- the answer

    async def _pumping(self) -> None:
        """Until the running answer is over."""
        if self._pump_worker is not None:
            await self._pump_worker.wait()

    async def _pump(self) -> None:
        """Redraw at a steady pace for as long as the answer lasts."""
        while self.client.busy:
            began = monotonic()
            await self._apply(self.client.take())
            took = monotonic() - began
            period = SLOW_PERIOD if took > BUSY else self._period
            await asyncio.sleep(max(0.02, period - took))

    async def _apply(self, update: Update) -> None:
        reply = self._reply
        if reply is None:
            return
        self.stats.add_all(update.rounds)
        self.cells.extend(
            Cell(len(round_.tokens), round_.drafted, round_.accepted) for round_ in update.rounds
        )
        self._waiting.extend(update.pieces)
        await self._show_text(reply)
        if update.rounds:
            self._live_status(update.rounds[-1].position)
        elif update.prefill is not None and update.prefill.done < update.prefill.total:
            share = 100 * update.prefill.done // max(1, update.prefill.total)
            self._set_status(
                replace(self._status, state=f"reading {share}%", position=update.prefill.done)
            )
        if update.ended:
            await self._ended(reply, update)

    async def _show_text(self, reply: Reply) -> None:
        if self._waiting and (self.transcript.following or not self.generating):
            pieces, self._waiting = self._waiting, []
            await reply.write(pieces)

    async def _ended(self, reply: Reply, update: Update) -> None:
        pieces, self._waiting = self._waiting, []
        await reply.write(pieces)
        answer = self.chat.last
        if answer is not None:
            await reply.finish(answer, estimated=True)
        if update.error is not None:
            help_ = "" if self.service.alive else " Ctrl+R reloads and answers again."
            reply.notice(f"{update.error}{help_}")
        elif answer is not None and answer.can_go_on:
            reply.notice("/continue goes on from here.")
        self._set_status(replace(self._status, state=""))
        self._reply = None
        self.loader.read_memory()
        await self._next()

    async def _next(self) -> None:
        """Send the next queued message."""
        if self.queued and not self.generating and self.info is not None:
            message = self.queued.popleft()
            message.remove_class("queued")
            await self.answer(lambda: self.chat.send(message.text))

    # -- the status line

    def _live_status(self, position: int) -> None:
        summary = self.stats.summary()
        tok_s = self.stats.rolling_tok_s
        plain = self.chat.plain_tok_s
        drafted = summary.drafted > 0
        self._set_status(
            replace(
                self._status,
                state="",
                tok_s=tok_s,
                ratio=tok_s / plain if plain and drafted else None,
                tau=summary.tau if drafted else None,
                draft_rate=summary.draft_rate if drafted else None,
                cells=tuple(self.cells),
                position=position,
            )
        )

    def _set_status(self, values: Status) -> None:
        self._status = values
        self._draw_status()

    def _draw_status(self) -> None:
        self.status_line.show(self._status)

    @on(Transcript.Following)
    def _following(self, event: Transcript.Following) -> None:
        self._below.set_class(not event.following, "shown")

    @on(Prompt.AtEnd)
    def _at_end(self) -> None:
        self.transcript.follow()
