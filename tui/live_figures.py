"""LiveFigures: keeps the status line and the stats panel true to what happens."""

from __future__ import annotations

from dataclasses import replace

from dflash_local.backend import BackendInfo, MemoryFigures
from dflash_local.chat import Answer
from dflash_local.events import Prefill, Round

from . import figures
from .answering import Answering
from .stats_panel import PanelValues, StatsPanel
from .status_line import Status, StatusLine


class LiveFigures:
    """Owns what the two widgets show; the screen tells it what changed."""

    def __init__(
        self, answering: Answering, line: StatusLine, panel: StatsPanel, *, pair: str
    ) -> None:
        self.plain_tok_s: float | None = None
        """Speed of plain decoding for this pair, once known."""
        self.estimated = True
        """Whether it comes from the short timing after the load."""
        self.memory: MemoryFigures | None = None
        self._answering = answering
        self._line = line
        self._panel = panel
        self._status = Status(state="loading", pair=pair)

    def loading(self, pair: str, state: str = "loading") -> None:
        """A pair is being loaded, or could not be."""
        self._show(Status(state=state, pair=pair))

    def loaded(self, info: BackendInfo, answer: Answer | None) -> None:
        """It is ready; ``answer`` is the last one of the chat that goes on."""
        self._show(
            replace(
                self._status,
                state="ready",
                block=info.block_size,
                position=_position(answer),
                context=info.context,
            )
        )

    def turned(self, answer: Answer | None) -> None:
        """The chat ends with another answer than the one that the figures are of, or with none."""
        self._answering.forget()
        before = self._status
        self._show(
            Status(
                state=before.state or "ready",
                block=before.block,
                position=_position(answer) if before.context else 0,
                context=before.context,
                memory=before.memory,
                pair=before.pair,
            )
        )
        self.show_panel(answer)

    def state(self, word: str) -> None:
        """A word in front of the line."""
        self._show(replace(self._status, state=word))

    def remember(self, memory: MemoryFigures) -> None:
        """What the engine holds."""
        self.memory = memory
        self._show(replace(self._status, memory=memory.peak))
        self.show_panel(None)

    def progressed(self, prefill: Prefill | None, rounds: tuple[Round, ...]) -> None:
        """The running answer got further."""
        if prefill is not None and prefill.done < prefill.total and not rounds:
            share = 100 * prefill.done // prefill.total
            state = f"reading prompt {share}%"
            self._show(replace(self._status, state=state, position=prefill.done))
        if not rounds:
            return
        stats = self._answering.stats
        summary, tok_s = stats.summary(), stats.rolling_tok_s
        drafted, plain = summary.drafted > 0, self.plain_tok_s
        self._show(
            replace(
                self._status,
                state="",
                tok_s=tok_s,
                ratio=tok_s / plain if plain and drafted else None,
                estimated=self.estimated,
                tau=summary.tau if drafted else None,
                draft_rate=summary.draft_rate if drafted else None,
                parked=rounds[-1].parked,
                cells=tuple(self._answering.cells),
                position=rounds[-1].position,
            )
        )
        self.show_panel(None)

    def answered(self, answer: Answer | None) -> None:
        """The answer ended: its whole takes the place of the last two seconds."""
        stats = answer.stats if answer is not None else None
        if stats is not None and stats.rounds:
            plain = self.plain_tok_s
            ratio = stats.tok_s / plain if plain and stats.drafted else None
            parked = self._status.parked or figures.mostly_parked(stats)
            self._status = replace(self._status, tok_s=stats.tok_s, ratio=ratio, parked=parked)
        self._show(replace(self._status, state=""))
        self.show_panel(answer)

    def show_panel(self, answer: Answer | None) -> None:
        """Draw the panel; ``answer`` is given once it is finished."""
        stats = self._answering.stats
        summary = stats.summary()
        self._panel.show(
            PanelValues(
                summary=summary,
                tok_s=stats.rolling_tok_s if self._answering.reply else summary.tok_s,
                plain_tok_s=self.plain_tok_s,
                estimated=self.estimated,
                memory=self.memory,
                parked=self._status.parked,
                usage=answer.usage if answer is not None else self._answering.usage,
            )
        )

    def _show(self, values: Status) -> None:
        self._status = values
        self._line.show(values)


def _position(answer: Answer | None) -> int:
    """Tokens of the context that a chat fills whose last answer this is."""
    usage = answer.usage if answer is not None else None
    return usage.prompt_tokens + usage.completion_tokens if usage is not None else 0
