"""Body: the text of one reply, Markdown at a cost that does not grow with the reply.

Markdown parses its last block anew whenever text is added, and highlights a fence in full. So a
block that grows past ``LARGE`` shows the rest as plain text until it closes, and one past
``HUGE`` stays plain.
"""

from __future__ import annotations

import webbrowser
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownFence

from .blocks import BlockScanner
from .plain_text import PlainText
from .visible import visible

LARGE = 2000
HUGE = 24_000


def _parser() -> MarkdownIt:
    """Raw HTML would be swallowed, and "main.rs" is no web address. Where a model begins a line it
    means one: a verse, an address."""
    parser = MarkdownIt("gfm-like", {"html": False, "linkify": False})
    parser.core.ruler.push("keep_lines", _keep_lines)
    return parser


def _keep_lines(state: StateCore) -> None:
    for block in state.tokens:
        for token in block.children or ():
            if token.type == "softbreak":
                token.type = "hardbreak"


class CopyLine(Static):
    """Under a code block; a click copies it."""

    DEFAULT_CSS = "CopyLine { height: 1; width: auto; padding: 0 2; color: $text-muted; }"

    def on_click(self, event: events.Click) -> None:
        """Ask for the copy."""
        event.stop()
        fence = self.parent
        if isinstance(fence, CodeBlock):
            self.post_message(CopyCode(fence.code))


class CopyCode(Message):
    """A code block is to be copied."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code


class CodeBlock(MarkdownFence):
    """A fence with a line to click."""

    def compose(self) -> ComposeResult:
        """The code and the line."""
        yield from super().compose()
        yield CopyLine(Content(f"{visible(self.lexer)} · click to copy".removeprefix(" · ")))


class ReplyMarkdown(Markdown):
    """Markdown with code blocks that can be copied."""

    BLOCKS = {  # noqa: RUF012
        **Markdown.BLOCKS,
        "fence": CodeBlock,
        "code_block": CodeBlock,
    }


class Body(Vertical):
    """Grows by ``append`` and is put in order by ``finish``."""

    DEFAULT_CSS = """
    Body { height: auto; }
    Body > ReplyMarkdown { padding: 0 2; margin: 0; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._scanner = BlockScanner()
        self._length = 0
        self._markdown: ReplyMarkdown | None = None
        self._tail: PlainText | None = None
        self._block_start = 0
        """Where the block begins whose end the tail shows."""

    async def append(self, text: str) -> None:
        """Add text as it came from the model."""
        text = visible(text)
        if not text:
            return
        begin = self._length
        self._length += len(text)
        marks = [at - begin for at in self._scanner.push(text) if at > begin]
        for left, right in pairwise((0, *marks, len(text))):
            if left:
                await self._close_tail(begin + left)
            await self._add(text[left:right])
        if self._tail is None and self._length - self._scanner.open_start > LARGE:
            await self._open_tail(self._scanner.open_start)

    async def finish(self) -> None:
        """No more text: what waited as plain text becomes Markdown where it is not huge."""
        await self._close_tail(self._length)

    async def _add(self, text: str) -> None:
        if self._tail is not None:
            await self._tail.append(text)
        elif len(text) > HUGE:
            self._markdown = None
            await self.mount(PlainText(text))
        else:
            if self._markdown is None:
                self._markdown = ReplyMarkdown(parser_factory=_parser, open_links=False)
                await self.mount(self._markdown)
            await self._markdown.append(text)

    async def _open_tail(self, block_start: int) -> None:
        self._block_start = block_start
        self._tail = PlainText(classes="tail")
        await self.mount(self._tail)

    async def _close_tail(self, end: int) -> None:
        tail, self._tail = self._tail, None
        if tail is None:
            return
        if self._markdown is None or end - self._block_start > HUGE:
            self._markdown = None
            return
        with self.app.batch_update():
            await self._markdown.append(tail.text)
            await tail.remove()

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """Open web pages only: a model may write any address."""
        event.stop()
        if event.href.startswith(("http://", "https://")):
            webbrowser.open(event.href)
