"""ChatScreen: transcript, prompt and status line, and what happens between them."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static
from textual.worker import Worker

from dflash_local.backend import BackendInfo
from dflash_local.chat import Chat, Conversation
from dflash_local.errors import ContextFull, DflashError, OptionError
from dflash_local.events import Event, Prefill, Round
from dflash_local.history import PromptHistory
from dflash_local.service import Service
from dflash_local.service_wire import ServiceOpener
from dflash_local.sessions import Session, SessionStore

from . import figures
from .answering import Answering
from .body import CopyCode
from .client import Update
from .commands import REGISTRY, copy_text
from .completions import Completions
from .key_line import KeyLine
from .live_figures import LiveFigures
from .loader import Loader
from .pair_load import PairLoad
from .prompt import Prompt
from .reply import Reply
from .settings import Settings
from .stats_panel import StatsPanel
from .status_line import StatusLine
from .tint import Legend
from .transcript import Note, Transcript, UserMessage
from .visible import visible

ALARM = "The draft is not helping (τ below 1.3): try /block off."


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
        words: str = "",
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
        self.load = PairLoad(self)
        self._words = words
        """Said at the start, about the session."""
        self.editing = False
        """The next message takes the place of the last one."""
        self.transcript = Transcript(ascii_only=look.ascii_only)
        self.prompt = Prompt()
        self.status_line = StatusLine(ascii_only=look.ascii_only)
        self.panel = StatsPanel(settings.panel, ascii_only=look.ascii_only)
        self.live = LiveFigures(self.answering, self.status_line, self.panel, pair=pair)
        self.queued: deque[UserMessage] = deque()
        self.completions = self.prompt.completions = Completions()
        self.keys = KeyLine(ascii_only=look.ascii_only)
        self._below = Static(Content("new text below · End"), id="below")
        self._worker: Worker[None] | None = None
        self._stopping = False
        """The running answer is to stop."""
        self._halting = False
        """Somebody waits for its end, and goes on before anything that is queued."""

    def compose(self) -> ComposeResult:
        """Transcript above, prompt and status below."""
        yield self.transcript
        yield self._below
        yield self.panel
        yield Legend()
        yield self.completions
        yield self.prompt
        yield self.keys
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
        if self._words:
            await self.transcript.add(Note(self._words, classes="error"))
        await self.load.watch()

    # -- state

    @property
    def generating(self) -> bool:
        """An answer is begun, being written, or somebody waits for its end."""
        return self._worker is not None or self._halting

    def refuse_while_generating(self) -> None:
        """For what has to wait for the end of an answer.

        Raises:
            OptionError: one is being written.
        """
        if self.generating:
            raise OptionError("An answer is being written.", "Stop it first, with Esc.")

    @property
    def info(self) -> BackendInfo | None:
        """What is loaded; None while nothing is."""
        return self.load.info

    @property
    def loader(self) -> Loader:
        """Watches the engine process."""
        return self.load.loader

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
        self.keys.keymap, self.keys.enter_sends = keymap, self.settings.enter_sends
        self.keys.say()

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

    @property
    def unsent(self) -> list[str]:
        """What waits to be sent, and what is still in the prompt."""
        waiting = [message.text for message in self.queued]
        return [*waiting, *([self.prompt.text] if self.prompt.text.strip() else [])]

    def tell(self, text: str, *, severity: Literal["information", "error"] = "information") -> None:
        """A passing word to the user, in the place of the one before."""
        self.app.clear_notifications()
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
            self.tell(f"{error} Ctrl+U empties the line.", severity="error")
            return
        await self.perform(action.id, argument)

    @on(Prompt.Browse)
    def _browse(self, event: Prompt.Browse) -> None:
        if self.completions.move(event.direction):
            return
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
        self.completions.show(self.prompt.text)

    async def send(self, text: str, queued: UserMessage | None = None) -> None:
        """Send a message now, or queue it; ``queued`` is where it waited until now."""
        self.transcript.follow()
        number = len(self.chat.conversation.turns)
        if self.generating or self.info is None:
            message = UserMessage(number, text, queued=True)
            self.queued.append(message)
            await self.transcript.add(message)
            return
        if self.editing:
            self.editing = False
            self.keys.say()
            await self.again(lambda: self.chat.edit(text), text, queued)
            return
        gone = [queued] if queued is not None else []
        message = UserMessage(number, text)
        self.answer(lambda: self.chat.send(text), number, message, instead_of=gone)

    async def again(
        self,
        make: Callable[[], Iterator[Event]],
        text: str,
        queued: UserMessage | None = None,
    ) -> None:
        """Answer the last turn anew, in the place of what is shown of it."""
        number = len(self.chat.conversation.turns) - 1
        gone: list[UserMessage | Reply] = [
            widget
            for widget in self.transcript.message_widgets()
            if widget is queued or (widget.turn == number and not widget.has_class("queued"))
        ]
        message = UserMessage(number, text)
        if self.service.alive:
            self.answer(make, number, message, instead_of=gone)
            return
        await self.transcript.add(message, instead_of=gone)
        self.load.waiting = make
        await self.load.reload()

    def answer(
        self,
        make: Callable[[], Iterator[Event]],
        turn: int,
        *messages: UserMessage,
        reply: Reply | None = None,
        instead_of: Sequence[Widget] = (),
    ) -> None:
        """Start an answer, in a new reply or going on in one.

        It counts as begun at once: what is pressed while its widgets come finds an answer running.

        Args:
            make: begins the answer, on a thread.
            turn: whose answer it is.
            messages: shown before a new reply.
            reply: the one to go on in.
            instead_of: widgets that go.

        Raises:
            OptionError: one is being written.
        """
        self.refuse_while_generating()
        if self.loader.timing:
            self.service.stop()
        self._stopping = False
        self.keys.say()
        self.keys.busy(True)
        shown: list[Widget] = []
        if reply is None:
            reply = self.transcript.new_reply(turn)
            shown = [*messages, reply]
        self._worker = self.run_worker(self._answer(make, reply, shown, instead_of), group="answer")

    async def _answer(
        self,
        make: Callable[[], Iterator[Event]],
        reply: Reply,
        shown: Sequence[Widget],
        instead_of: Sequence[Widget],
    ) -> None:
        if shown:
            await self.transcript.add(*shown, instead_of=instead_of)
        self.transcript.follow()
        await self.answering.run(make, reply)

    def stop(self) -> None:
        """Stop after the current round."""
        self._stopping = self._worker is not None
        self.service.stop()
        self.live.state("stopping")

    async def halt(self) -> None:
        """Stop the running answer and wait for its end; what is queued stays queued."""
        worker = self._worker
        if worker is None:
            return
        self._halting = True
        try:
            self.stop()
            await worker.wait()
        finally:
            self._halting = False

    async def open_session(self, session: Session) -> None:
        """Go on with another saved chat, or a new one."""
        options = self.chat.options
        plain, estimated = self.chat.plain_tok_s, self.chat.estimated
        self.session.close()
        self.previous, self.session = self.session, session
        self.chat = Chat(
            self.service, session.conversation, options=options, model=self.pair, record=session
        )
        self.chat.plain_tok_s, self.chat.estimated = plain, estimated
        self.editing = False
        self.live.turned(self.chat.last)
        await self.transcript.show(session.conversation)

    # -- the answer

    def waited(self) -> None:
        """The answer runs on; asked to stop before it ran, it is asked again."""
        if self._stopping:
            self.service.stop()

    def progressed(self, prefill: Prefill | None, rounds: tuple[Round, ...]) -> None:
        """Figures of the running answer have changed."""
        self.live.progressed(prefill, rounds)
        if rounds and self.answering.stats.draft_not_helping:
            self.keys.say(ALARM, alarm=True)

    async def answered(self, reply: Reply, update: Update) -> None:
        """The answer ended; its text is all shown."""
        answer = self.chat.last
        turns = self.chat.conversation.turns
        if turns and len(turns[-1].versions) > 1:
            reply.versions = f" · answer {turns[-1].shown + 1} of {len(turns[-1].versions)}"
        if answer is not None:
            await reply.finish(answer)
        if update.error is not None:
            again = "" if self.service.alive else " Ctrl+R reloads and answers again."
            if isinstance(update.error, ContextFull):
                again = " /room leaves the oldest turns out, then Ctrl+R answers."
            reply.notice(f"{update.error}{again}")
        elif answer is not None and (words := figures.how_to_go_on(answer)):
            reply.notice(words)
        trouble = self.session.trouble()
        if trouble is not None:
            self.tell(str(trouble), severity="error")
        self._worker = None
        self.keys.busy(False)
        self.live.answered(answer)
        if not self.service.alive:
            return
        self.loader.read_memory()
        await self.send_next()
        drafted = answer is not None and answer.stats is not None and answer.stats.drafted
        if self.live.plain_tok_s is None and drafted and not self.generating:
            self.loader.time_on(self.chat.conversation.messages()[:-1])

    async def send_next(self) -> None:
        """Send the next queued message, if there is one and nothing stands in its way."""
        if self.queued and not self.generating and self.info is not None:
            message = self.queued.popleft()
            await self.send(message.text, message)

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
