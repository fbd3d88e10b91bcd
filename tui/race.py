"""Race: plain and speculative decoding of one prompt, run in turn, replayed on one clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from dflash_local.errors import DflashError
from dflash_local.events import Done, Text
from dflash_local.prompting import Prompt
from dflash_local.sampling import SamplingParams
from dflash_local.service import Service

from . import figures
from .dialog import Dialog
from .visible import visible

LENGTH = 160
"""Tokens per runner."""
FRAME_S = 0.1
TIE = 0.05
"""Margin of the best two scores below which a difference is rounding."""


@dataclass(slots=True)
class Run:
    """One runner: when which text came, and how it ended."""

    name: str
    texts: list[tuple[float, str]] = field(default_factory=list)
    done: Done | None = None
    seconds: float = 0.0

    def text_at(self, clock: float) -> str:
        """What it had said after ``clock`` seconds."""
        return "".join(text for at, text in self.texts if at <= clock)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the race showed."""

    identical: bool
    position: int = 0
    """The first difference, in tokens."""
    margin: float = 0.0
    """Top-1 minus top-2 there."""
    ratio: float = 0.0

    @property
    def words(self) -> str:
        """One line."""
        if self.identical:
            return f"identical ids · {self.ratio:.2f}× plain"
        tie = "a score tie" if self.margin < TIE else "not a tie"
        return (
            f"ids differ from token {self.position} on, margin {self.margin:.3f}: {tie}"
            f" · {self.ratio:.2f}× plain"
        )


def judge(prompt: Prompt, plain: Done, fast: Done, margin: Callable[[list[int]], float]) -> Verdict:
    """Compare two answers to one prompt."""
    ratio = fast.stats.tok_s / plain.stats.tok_s if plain.stats.tok_s else 0.0
    pairs = enumerate(zip(plain.tokens, fast.tokens, strict=False))
    place = next((index for index, (one, two) in pairs if one != two), None)
    if place is None and len(plain.tokens) == len(fast.tokens):
        return Verdict(True, ratio=ratio)
    if place is None:
        place = min(len(plain.tokens), len(fast.tokens))
    return Verdict(False, place, margin([*prompt.ids, *plain.tokens[:place]]), ratio)


class RaceScreen(Dialog[float | None]):
    """Runs and replays; returns the plain speed that it measured."""

    DEFAULT_CSS = """
    RaceScreen { background: $background; }
    RaceScreen .lane { width: 1fr; border: round $primary; padding: 0 1; }
    RaceScreen .head { height: 1; text-style: bold; }
    RaceScreen #verdict { height: auto; padding: 0 1; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "leave", "Close", show=False),
        Binding("space", "replay", "Replay", show=False),
    ]

    class Ended(Message):
        """Both have run, or it broke off."""

        def __init__(self, verdict: Verdict | None, error: str = "") -> None:
            super().__init__()
            self.verdict = verdict
            self.error = error

    def __init__(self, service: Service, prompt: Prompt, length: int = LENGTH) -> None:
        super().__init__()
        self._service = service
        self._prompt = prompt
        self._length = length
        self.runs = (Run("plain"), Run("speculative"))
        self.verdict: Verdict | None = None
        self._heads = (Static(classes="head"), Static(classes="head"))
        self._bodies = (Static(), Static())
        self._said = Static("", id="verdict")
        self._began: float | None = None
        self._cancelled = False

    def compose(self) -> ComposeResult:
        """Two lanes and the verdict."""
        with Horizontal():
            for head, body in zip(self._heads, self._bodies, strict=True):
                with Vertical(classes="lane"):
                    yield head
                    with VerticalScroll(can_focus=False) as lane:
                        lane.anchor()
                        yield body
        yield self._said

    def on_mount(self) -> None:
        """Run both on a thread; draw at a steady pace."""
        self._say("Plain runs first, then speculative; then both on one clock. Esc leaves.")
        threading.Thread(target=self._race, name="dflash-race", daemon=True).start()
        self.set_interval(FRAME_S, self._draw)

    def action_leave(self) -> None:
        """Close; the plain speed counts where it was measured."""
        self._cancelled = True
        self._service.stop()
        done = self.runs[0].done
        measured = done.stats.tok_s if done is not None and self.verdict is not None else None
        self.dismiss(measured)

    def action_replay(self) -> None:
        """Play both once more."""
        if self.verdict is not None:
            self._began = monotonic()

    def on_race_screen_ended(self, event: Ended) -> None:
        """Show the verdict and the replay."""
        self.verdict = event.verdict
        if event.verdict is None:
            self._say(event.error)
            return
        self._say(f"{event.verdict.words} · Space plays it again · Esc leaves")
        self._began = monotonic()

    def _race(self) -> None:
        try:
            for run, block in zip(self.runs, (0, None), strict=True):
                if self._cancelled:
                    return
                began = monotonic()
                for event in self._service.stream(
                    self._prompt, SamplingParams(max_tokens=self._length), block=block
                ):
                    if isinstance(event, Text):
                        text = "".join(piece.text for piece in event.pieces)
                        run.texts.append((monotonic() - began, text))
                    elif isinstance(event, Done):
                        run.done = event
                run.seconds = monotonic() - began
            one, two = (run.done for run in self.runs)
            if one is None or two is None or self._cancelled:
                return
            verdict = judge(self._prompt, one, two, lambda ids: self._service.margin(ids))
            self.post_message(self.Ended(verdict))
        except DflashError as error:
            self.post_message(self.Ended(None, str(error)))

    def _draw(self) -> None:
        clock = float("inf") if self._began is None else monotonic() - self._began
        for run, head, body in zip(self.runs, self._heads, self._bodies, strict=True):
            words = run.name
            if run.done is not None and clock >= run.seconds:
                words += f"  {figures.speed(run.done.stats.tok_s)}  {figures.seconds(run.seconds)}"
            head.update(Content(words))
            body.update(Content(visible(run.text_at(clock))))

    def _say(self, text: str) -> None:
        self._said.update(Content(visible(text)))
