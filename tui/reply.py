"""Reply: one answer on screen: thinking, text, and the figures under it."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from dflash_local.chat import Answer
from dflash_local.events import Round, Text
from dflash_local.trace import Trace

from . import figures
from .body import Body
from .commands import REGISTRY
from .plain_text import PlainText
from .tint import TintView
from .visible import visible


class Thinking(Vertical):
    """What the model thought, on one line until opened."""

    DEFAULT_CSS = """
    Thinking { height: auto; display: none; padding: 0 2; }
    Thinking.used { display: block; }
    Thinking > Static { color: $text-muted; }
    Thinking > PlainText { display: none; color: $text-muted; padding: 0 0 0 2; }
    Thinking.opened > PlainText { display: block; }
    """

    def __init__(self, *, saved: bool = False) -> None:
        super().__init__()
        self._saved = saved
        """Read from a file, which does not tell how long it took."""
        self._line = Static()
        self._text = PlainText()
        self._tokens = 0
        self._began: float | None = None
        self._seconds: float | None = None
        self._waiting: list[str] = []

    def compose(self) -> ComposeResult:
        """The line and the text under it."""
        yield self._line
        yield self._text

    async def append(self, text: str, tokens: int) -> None:
        """Add thinking; laid out only while it can be seen."""
        if self._began is None:
            self._began = monotonic()
            self.add_class("used")
        self._tokens += tokens
        self._waiting.append(visible(text))
        if self.has_class("opened"):
            await self._show()
        self._draw()

    def close(self, tokens: int | None = None, seconds: float | None = None) -> None:
        """The answer begins, or the reply ended."""
        if self._began is not None and self._seconds is None:
            self._seconds = monotonic() - self._began
        self._seconds = seconds if seconds is not None else self._seconds
        self._tokens = tokens or self._tokens
        self._draw()

    async def toggle(self) -> None:
        """Open or close."""
        self.toggle_class("opened")
        if self.has_class("opened"):
            await self._show()
        self._draw()

    async def on_click(self, event: events.Click) -> None:
        """A click on the line opens it."""
        event.stop()
        await self.toggle()

    async def _show(self) -> None:
        text = "".join(self._waiting)
        self._waiting.clear()
        await self._text.append(text)

    def _draw(self) -> None:
        if self._began is None:
            return
        done = self._seconds is not None
        elapsed = self._seconds if self._seconds is not None else monotonic() - self._began
        mark = "▾" if self.has_class("opened") else "▸"
        words = "thought" if done else "thinking"
        if not self._saved:
            words += f" {figures.seconds(elapsed)}"
        if self._tokens:
            words += f" · {self._tokens} tok"
        self._line.update(Content(f"{words} {mark}"))


class Reply(Vertical, can_focus=True):
    """Grows by ``write``, ends with ``finish``."""

    DEFAULT_CSS = """
    Reply { height: auto; margin: 0 0 1 0; border-left: blank; }
    Reply:focus { border-left: outer $primary; }
    Reply > #notice { height: auto; padding: 0 2; color: $text-warning; display: none; }
    Reply > #footer { height: auto; padding: 0 2; color: $text-muted; display: none; }
    Reply.ended > #footer, Reply.noticed > #notice { display: block; }
    Reply > TintView { display: none; }
    Reply.tinted > TintView { display: block; }
    Reply.tinted > Body { display: none; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [*REGISTRY.bindings("message")]

    class FooterClicked(Message):
        """The figures were clicked: copy the reply."""

        def __init__(self, reply: Reply) -> None:
            super().__init__()
            self.reply = reply

    def __init__(
        self,
        turn: int,
        answer: Answer | None = None,
        *,
        tinted: bool = False,
        ascii_only: bool = False,
    ) -> None:
        super().__init__(classes="tinted" if tinted else None)
        self.turn = turn
        self.answer = answer
        self._ascii = ascii_only
        self._trace: Trace | None = Trace() if answer is None else None
        """While the reply grows; a finished one has it in its answer."""
        self._tint = TintView()
        self.versions = ""
        """`` · answer 2 of 3`` behind the figures, where there are several."""
        self.thinking = Thinking(saved=answer is not None)
        self.body = Body()
        self._footer = Static(id="footer")
        self._notice = Static(id="notice")

    def compose(self) -> ComposeResult:
        """Thinking above, figures below."""
        yield self.thinking
        yield self.body
        yield self._tint
        yield self._notice
        yield self._footer

    async def on_mount(self) -> None:
        """Show a saved answer."""
        answer = self.answer
        if answer is None:
            return
        if answer.thinking:
            await self.thinking.append(answer.thinking, 0)
        await self.body.append(answer.text)
        await self.finish(answer)

    async def write(self, texts: Sequence[Text], rounds: Sequence[Round]) -> None:
        """Add what came since the last redraw."""
        if self._trace is not None:
            for text in texts:
                self._trace.add(text)
            for round_ in rounds:
                self._trace.add(round_)
        pieces = [piece for text in texts for piece in text.pieces]
        thought = "".join(p.text for p in pieces if p.channel == "think")
        said = "".join(p.text for p in pieces if p.channel == "answer")
        if thought:
            await self.thinking.append(thought, sum(p.channel == "think" for p in pieces))
        if said:
            self.thinking.close()
            await self.body.append(said)
        if texts:
            self._draw_tint()

    def tint(self, on: bool) -> None:
        """Show where the tokens came from, or the text as Markdown."""
        self.set_class(on, "tinted")
        self._draw_tint()

    def step(self, direction: int) -> None:
        """Look at the round before or after, while tinted."""
        if self.has_class("tinted"):
            self._tint.step(direction, self._traced())
            self._draw_tint()

    def begin_again(self) -> None:
        """The answer goes on: its end is no longer shown."""
        self.remove_class("ended", "noticed")
        self._trace = self._traced()

    def _traced(self) -> Trace:
        if self._trace is not None:
            return self._trace
        answer = self.answer or Answer()
        return Trace.decode(answer.trace, answer.text)

    def _draw_tint(self) -> None:
        if self.has_class("tinted"):
            self._tint.draw(self._traced(), live=self._trace is not None)

    def on_click(self, event: events.Click) -> None:
        """A click on the figures copies."""
        if event.widget is self._footer:
            event.stop()
            self.post_message(self.FooterClicked(self))

    async def finish(self, answer: Answer) -> None:
        """The answer ended."""
        self.answer, self._trace = answer, None
        tokens = answer.usage.thinking_tokens if answer.usage else None
        self.thinking.close(tokens)
        await self.body.finish()
        words = figures.footer(answer) + self.versions
        self._footer.update(Content(figures.in_ascii(words) if self._ascii else words))
        self.add_class("ended")
        self._draw_tint()
        if answer.error:
            self.notice(answer.error)

    def notice(self, text: str) -> None:
        """A line of ours under the text."""
        self._notice.update(Content(visible(text)))
        self.set_class(bool(text), "noticed")
