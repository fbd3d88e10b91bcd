"""ChatScreen: transcript, prompt and status line, and what happens between them."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static
from textual.worker import Worker

from dflash_local.backend import BackendInfo, MemoryFigures
from dflash_local.chat import Chat, Conversation
from dflash_local.errors import DflashError, NotDownloaded
from dflash_local.events import Event, Prefill, Round
from dflash_local.history import PromptHistory
from dflash_local.service import Service
from dflash_local.service_wire import ServiceOpener
from dflash_local.sessions import Session, SessionStore

from . import figures, messages
from .answering import Answering
from .body import CopyCode
from .client import Update
from .commands import REGISTRY, copy_text
from .live_figures import LiveFigures
from .loader import Loader
from .loading import LoadingCard
from .prompt import Prompt
from .reply import Reply
from .settings import Settings
from .stats_panel import StatsPanel
from .status_line import StatusLine
from .transcript import Note, Transcript, UserMessage
from .visible import visible

HINT = "Enter send · Ctrl+J new line · Esc stop · / commands · F1 help · Ctrl+C twice quits"
SWAPPED_HINT = HINT.replace("Enter send · Ctrl+J new line", "Ctrl+J send · Enter new line")
ALARM = "The draft is not helping here (τ below 1.3 over 40 rounds). /block off decodes plainly."
TWICE_S = 2.0
"""Seconds within which a second press counts."""


@dataclass(frozen=True, slots=True)
class Look:
    """How the screen is drawn, apart from the theme."""

    low_bandwidth: bool = False
    ascii_only: bool = False


class ChatScreen(Screen[None]):
    """One chat with one service."""

    BINDINGS: ClassVar[list[BindingType]] = [*REGISTRY.bindings("chat")]
    AUTO_FOCUS = "Prompt"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-normal"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012

    def __init__(
        self,
        service: Service,
        *,
        pair: str,
        settings: Settings,
        look: Look,
        session: Session | None = None,
        openers: Callable[[str], ServiceOpener] | None = None,
    ) -> None:
        super().__init__()
        self.service = service
        self.pair = pair
        self.settings = settings
        self.openers = openers
        """Makes the loader of a pair by name; None where the model cannot be switched."""
        self.store = SessionStore()
        self.history = PromptHistory()
        self.session = session or self.store.create(Conversation(), pair)
        self.previous: Session | None = None
        """The chat before the last new one."""
        self.chat = Chat(service, self.session.conversation, model=pair, record=self.session)
        self.answering = Answering(self, low_bandwidth=look.low_bandwidth)
        self.loader = Loader(service, self)
        self.info: BackendInfo | None = None
        self.memory_before: MemoryFigures | None = None
        """Before the model was switched."""
        self.editing = False
        """The next message takes the place of the last one."""
        self.transcript = Transcript(ascii_only=look.ascii_only)
        self.prompt = Prompt()
        self.status_line = StatusLine(ascii_only=look.ascii_only)
        self.panel = StatsPanel(settings.panel, ascii_only=look.ascii_only)
        self.live = LiveFigures(self.answering, self.status_line, self.panel, pair=pair)
        self.queued: deque[UserMessage] = deque()
        self.completions = Static(id="completions")
        self._hint = Static(id="hint")
        self._below = Static(Content("new text below · End"), id="below")
        self._armed: dict[str, float] = {}
        self._worker: Worker[None] | None = None
        self._after_load: Callable[[], Iterator[Event]] | None = None

    def compose(self) -> ComposeResult:
        """Transcript above, prompt and status below."""
        yield self.transcript
        yield self._below
        yield self.panel
        yield self.completions
        yield self.prompt
        yield self._hint
        yield self.status_line
        yield Static(Content("dflash-chat needs a little more room; the chat goes on."), id="small")

    def on_resize(self) -> None:
        """Below 40 x 10 there is no sense in the parts."""
        size = self.app.size  # inline, the screen is lower than the terminal
        tiny = size.width < 40 or size.height < 10
        if self.has_class("-tiny") and not tiny:
            self.call_after_refresh(self.prompt.focus)
        self.set_class(tiny, "-tiny")

    async def on_mount(self) -> None:
        """Show what was saved, watch the load."""
        self.apply_settings()
        await self.transcript.show(self.chat.conversation)
        await self.watch_load()

    # -- state

    @property
    def generating(self) -> bool:
        """An answer is being written."""
        return self._worker is not None

    @property
    def following(self) -> bool:
        """Whether the end of the chat is in view."""
        return self.transcript.following

    def focused_reply(self) -> Reply | None:
        """The reply with the focus, else the last one."""
        if isinstance(self.focused, Reply):
            return self.focused
        replies = self.query(Reply)
        return replies.last() if replies else None

    def apply_settings(self) -> None:
        """Bring the settings to bear."""
        self.prompt.enter_sends = self.settings.enter_sends
        keymap = self.settings.keymap
        if "prompt.send" in keymap:
            self.prompt.send_keys = set(keymap["prompt.send"].split(","))
        if "prompt.newline" in keymap:
            self.prompt.newline_keys = set(keymap["prompt.newline"].split(","))
        self.hint()

    def hint(self, text: str = "", *, alarm: bool = False) -> None:
        """Put a line under the prompt; the usual one by default."""
        usual = HINT if self.settings.enter_sends else SWAPPED_HINT
        self._hint.update(Content(visible(text or usual)))
        self._hint.set_class(alarm, "alarm")

    def twice(self, what: str, words: str) -> bool:
        """Whether this is the second press within a moment; the first one is told."""
        if monotonic() - self._armed.get(what, 0.0) < TWICE_S:
            return True
        self._armed[what] = monotonic()
        self.hint(words)
        self.set_timer(TWICE_S, self.hint)
        return False

    # -- actions

    async def action_run(self, action_id: str) -> None:
        """Run an action of the registry."""
        await self.perform(action_id, REGISTRY[action_id].argument)

    async def perform(self, action_id: str, argument: str) -> None:
        """Run an action with an argument; its errors are told, not raised."""
        try:
            result = REGISTRY[action_id].run(self, argument)
            if inspect.isawaitable(result):
                await result
        except DflashError as error:
            self.tell(str(error), severity="error")

    def tell(self, text: str, *, severity: Literal["information", "error"] = "information") -> None:
        """A passing word to the user."""
        self.app.notify(visible(text), severity=severity, markup=False)

    # -- sending

    @on(Prompt.Sent)
    async def _sent(self, event: Prompt.Sent) -> None:
        text = event.text
        self.history.add(text)
        if not text.startswith("/") or text.startswith("//"):
            await self.send(text[1:] if text.startswith("//") else text)
            return
        try:
            action, argument = REGISTRY.parse(text)
        except DflashError as error:
            self.prompt.set_text(text)
            self.tell(str(error), severity="error")
            return
        await self.perform(action.id, argument)

    @on(Prompt.Browse)
    def _browse(self, event: Prompt.Browse) -> None:
        if event.direction < 0 and self.queued and not self.prompt.text:
            message = self.queued.pop()
            message.remove()
            self.prompt.set_text(message.text)
            return
        text = self.history.move(event.direction, self.prompt.full_text)
        if text is not None:
            self.prompt.set_text(text)

    @on(Prompt.Changed)
    def _typed(self) -> None:
        actions = REGISTRY.complete(self.prompt.text)[:8]
        self.completions.set_class(bool(actions), "shown")
        if actions:
            lines = (f"{action.usage:<30} {action.title}" for action in actions)
            self.completions.update(Content("\n".join(lines) + "\nTab completes"))

    async def send(self, text: str) -> None:
        """Send a message now, or queue it."""
        self.transcript.follow()
        number = len(self.chat.conversation.turns)
        if self.generating or self.info is None:
            message = UserMessage(number, text, queued=True)
            self.queued.append(message)
            await self.transcript.add(message)
            return
        if self.editing:
            self.editing = False
            self.hint()
            await self.again(lambda: self.chat.edit(text), text)
            return
        await self.transcript.add(UserMessage(number, text))
        await self.answer(lambda: self.chat.send(text), number)

    async def again(self, make: Callable[[], Iterator[Event]], text: str) -> None:
        """Answer the last turn anew, in the place of what is shown of it."""
        number = len(self.chat.conversation.turns) - 1
        for widget in self.transcript.message_widgets():
            if widget.turn == number and not widget.has_class("queued"):
                await widget.remove()
        await self.transcript.add(UserMessage(number, text))
        if self.service.alive:
            await self.answer(make, number)
            return
        self._after_load = make
        await self.reload()

    async def answer(
        self, make: Callable[[], Iterator[Event]], turn: int, reply: Reply | None = None
    ) -> None:
        """Start an answer, in a new reply or going on in one."""
        if self.loader.timing:
            self.service.stop()
        if reply is None:
            reply = self.transcript.new_reply(turn)
            await self.transcript.add(reply)
        self.hint()
        self.transcript.follow()
        self._worker = self.run_worker(self.answering.run(make, reply), group="answer")

    def stop(self) -> None:
        """Stop after the current round."""
        self.service.stop()
        self.live.state("stopping")

    async def until_idle(self) -> None:
        """Wait for the running answer to end."""
        if self._worker is not None:
            await self._worker.wait()

    async def open_session(self, session: Session) -> None:
        """Go on with another saved chat, or a new one."""
        options = self.chat.options
        plain = self.chat.plain_tok_s
        self.session.close()
        self.previous, self.session = self.session, session
        self.chat = Chat(
            self.service, session.conversation, options=options, model=self.pair, record=session
        )
        self.chat.plain_tok_s = plain
        self.editing = False
        await self.transcript.show(session.conversation)

    # -- the load

    async def watch_load(self) -> None:
        """Show the progress of the load that is going on."""
        self.info = None
        await self.transcript.add(LoadingCard(self.pair))
        self.live.loading(self.pair)
        self.loader = Loader(self.service, self)
        self.loader.start()

    async def reload(self, opener: ServiceOpener | None = None) -> None:
        """Start the engine process anew, perhaps with another pair."""
        self.memory_before = self.live.memory
        self.service.reload(opener)
        await self.watch_load()

    @on(messages.LoadStep)
    def _load_step(self, event: messages.LoadStep) -> None:
        for card in self.query(LoadingCard):
            card.show(event.progress)

    @on(messages.Loaded)
    async def _loaded(self, event: messages.Loaded) -> None:
        self.info = info = event.info
        await self.query(LoadingCard).remove()
        await self.query(".loaded").remove()
        draft = f" with {info.draft}" if info.draft else ", no draft"
        where = f"{info.backend} on {info.device}"
        words = f"Ready: {info.target}{draft} · {where} · {figures.seconds(event.seconds)}"
        await self.transcript.mount(Note(words, classes="loaded"), before=0)
        self.live.loaded(info)
        waiting, self._after_load = self._after_load, None
        if waiting is not None:
            await self.answer(waiting, len(self.chat.conversation.turns) - 1)
        else:
            await self._next()

    @on(messages.LoadFailed)
    async def _load_failed(self, event: messages.LoadFailed) -> None:
        await self.query(LoadingCard).remove()
        self.live.loading(self.pair, "not loaded")
        await self.transcript.add(Note(str(event.error), classes="error"))
        if isinstance(event.error, NotDownloaded):
            await self.perform("model.choose", "")

    @on(messages.PlainSpeed)
    def _plain_speed(self, event: messages.PlainSpeed) -> None:
        self.chat.plain_tok_s = self.live.plain_tok_s = event.tok_s
        self.live.estimated = event.estimated

    @on(messages.MemoryRead)
    async def _memory_read(self, event: messages.MemoryRead) -> None:
        before, self.memory_before = self.memory_before, None
        self.live.remember(event.memory)
        if before is not None and before.peak:
            words = f"Memory: {figures.gigabytes(before.peak)} before, "
            self.tell(words + f"{figures.gigabytes(event.memory.peak)} now.")

    # -- the answer

    def progressed(self, prefill: Prefill | None, rounds: tuple[Round, ...]) -> None:
        """Figures of the running answer have changed."""
        self.live.progressed(prefill, rounds)
        if rounds and self.answering.stats.draft_not_helping:
            self.hint(ALARM, alarm=True)

    async def answered(self, reply: Reply, update: Update) -> None:
        """The answer ended; its text is all shown."""
        answer = self.chat.last
        turns = self.chat.conversation.turns
        if turns and len(turns[-1].versions) > 1:
            reply.versions = f" · answer {turns[-1].shown + 1} of {len(turns[-1].versions)}"
        if answer is not None:
            await reply.finish(answer, estimated=self.live.estimated)
        if update.error is not None:
            again = "" if self.service.alive else " Ctrl+R reloads and answers again."
            reply.notice(f"{update.error}{again}")
        elif answer is not None and answer.can_go_on:
            reply.notice("/continue goes on from here.")
        trouble = self.session.trouble()
        if trouble is not None:
            self.tell(str(trouble), severity="error")
        self._worker = None
        self.live.answered(answer)
        if not self.service.alive:
            return
        self.loader.read_memory()
        await self._next()
        drafted = answer is not None and answer.stats is not None and answer.stats.drafted
        if self.live.plain_tok_s is None and drafted and not self.generating:
            self.loader.time_on(self.chat.conversation.messages()[:-1])

    async def _next(self) -> None:
        """Send the next queued message."""
        if self.queued and not self.generating and self.info is not None:
            message = self.queued.popleft()
            await message.remove()
            await self.send(message.text)

    # -- the view

    @on(Transcript.Following)
    def _following(self, event: Transcript.Following) -> None:
        self._below.set_class(not event.following, "shown")

    @on(Prompt.AtEnd)
    def _at_end(self) -> None:
        self.transcript.follow()

    @on(CopyCode)
    def _copy_code(self, event: CopyCode) -> None:
        copy_text(self, event.code, "the code block")

    @on(Reply.FooterClicked)
    def _copy_reply(self, event: Reply.FooterClicked) -> None:
        if event.reply.answer is not None:
            copy_text(self, event.reply.answer.text, "the reply")
