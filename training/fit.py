"""Third stage: the draft learns to say what the target said, block by block."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dflash_local.errors import EngineError

from . import blocks, checkpoint
from .blocks import Batch
from .checkpoint import Progress
from .corpus import Corpus
from .losses import Outcome, SlotLoss
from .network import DraftNetwork
from .recipe import FitRecipe
from .teacher import Teacher

Report = Callable[[Progress, float, float], None]
"""Called after every step with loss and tau, both smoothed."""

_TIMED = 8
"""Steps after which a run that is given minutes knows how many steps they hold."""

_SMOOTH = 0.95

_CODEBOOK_DECAY = 0.5
"""Weight decay of a selector's codebooks. A row of theirs learns from the few places where its id
stands, at Adam's full rate: a pair that came by once would be believed like a habit."""


class Fit:
    """A network, its optimizer and how far they are.

    Args:
        folder: of the third stage; the checkpoint lies there.
        recipe: the numbers.
        network: with its first weights; a checkpoint replaces them.
        corpus: of the second stage.
        teacher: the target.
        autocast: what products are computed in; None is fp32.
    """

    def __init__(
        self,
        folder: Path,
        recipe: FitRecipe,
        network: DraftNetwork,
        corpus: Corpus,
        teacher: Teacher,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._recipe, self._corpus, self._teacher = recipe, corpus, teacher
        self._device, self._autocast = teacher.device, autocast
        self._path = folder / "checkpoint.safetensors"
        self.network = network.to(self._device).train()
        groups: dict[float, list[torch.nn.Parameter]] = {}
        for name, parameter in network.named_parameters():
            decay = 0.0 if parameter.dim() < 2 else recipe.decay
            decay = _CODEBOOK_DECAY if name.endswith("codebook") else decay
            groups.setdefault(decay, []).append(parameter)
        self._optimizer = torch.optim.AdamW(
            [{"params": params, "weight_decay": decay} for decay, params in groups.items()],
            lr=recipe.rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )
        self.progress = checkpoint.load(self._path, network, self._optimizer)
        if recipe.steps:
            self.progress.steps = recipe.steps
        head = teacher.head if autocast is None else teacher.head.to(autocast)
        ranked = corpus.ranked(len(head), recipe.draft_vocab)
        self.ids = ranked if recipe.draft_vocab else None
        """The ids of a reduced vocabulary; None where the draft can say all of them."""
        self._loss = SlotLoss(head, ranked, recipe)
        self._epoch = -1
        self._order: list[list[int]] = []

    def run(self, report: Report = lambda progress, loss, tau: None) -> None:
        """Train to the last step; a kill loses what came after the last checkpoint.

        Raises:
            EngineError: the loss is no number any more; the last checkpoint stays.
        """
        progress, recipe = self.progress, self._recipe
        saved = time.monotonic()
        loss = tau = math.nan
        with patient_interrupt() as interrupted:
            while not progress.steps or progress.step < progress.steps:
                begun = time.monotonic()
                outcome = self._step(progress.step)
                value = float(outcome.loss.detach())
                if not math.isfinite(value):
                    raise EngineError(
                        f"The loss is {value} at step {progress.step}.",
                        f"The checkpoint of step {self._saved_step()} is kept; give a lower "
                        "--rate and run the same command again.",
                    )
                loss = _smoothed(loss, value)
                tau = _smoothed(tau, outcome.tau)
                progress.step += 1
                progress.seconds += time.monotonic() - begun
                due = time.monotonic() - saved >= recipe.save_seconds
                if not progress.steps and progress.step >= _TIMED:
                    per_step = progress.seconds / progress.step
                    progress.steps = max(_TIMED, round((recipe.minutes or 60.0) * 60 / per_step))
                    due = True  # the number of steps must survive a kill
                # Before it is saved: what is killed in a check is checked again.
                report(progress, loss, tau)
                if due or progress.step == progress.steps or interrupted():
                    progress.history.append((progress.step, progress.seconds, loss, tau))
                    checkpoint.save(self._path, self.network, self._optimizer, progress)
                    saved = time.monotonic()
                if interrupted():
                    raise KeyboardInterrupt

    def _saved_step(self) -> int:
        return self.progress.history[-1][0] if self.progress.history else 0

    def _step(self, step: int) -> Outcome:
        """One update; everything in it follows from the seed and the number of the step."""
        recipe = self._recipe
        seed = recipe.seed * 1_000_003 + step
        batch = self._batch(step, seed)
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.rate * self._share(step)
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            outcome = self._loss(self.network, self._states(batch), batch, seed)
        self._optimizer.zero_grad(set_to_none=True)
        if torch.isfinite(outcome.loss):
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), recipe.clip)
            self._optimizer.step()
        return outcome

    def _states(self, batch: Batch) -> torch.Tensor:
        features = batch.features
        if features is None:
            features = self._teacher.features(batch.ids).clone()
        rows = batch.before.shape[2] + 1
        block = torch.full((*batch.anchors.shape, rows), self.network.config.mask_token_id)
        block = block.to(self._device)
        block[:, :, 0] = batch.before[:, :, 0]
        embedded = self._teacher.embed(block).float()
        states: torch.Tensor = self.network(features.float(), batch.anchors, embedded)
        return states

    def _batch(self, step: int, seed: int) -> Batch:
        recipe = self._recipe
        per_epoch = -(-len(self._corpus) // recipe.sequences)
        epoch, place = divmod(step, per_epoch)
        if epoch != self._epoch:
            self._order = blocks.order(self._corpus, recipe.sequences, recipe.seed, epoch)
            self._epoch = epoch
        short = self.progress.steps * recipe.short_share
        rows = recipe.block if self.progress.steps and step >= short else recipe.short_block
        # Short blocks are more of them, so that every step has about as many rows.
        anchors = max(1, recipe.anchors * recipe.block // rows)
        return blocks.draw(self._corpus, self._order[place], anchors, rows, seed).to(self._device)

    def _share(self, step: int) -> float:
        """Of the learning rate: a rise, then half a cosine down to zero."""
        steps = self.progress.steps
        rise = max(1, round((steps or 5000) * self._recipe.warm_up))
        if step < rise or not steps:
            return min(1.0, (step + 1) / rise)
        return 0.5 * (1.0 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _smoothed(before: float, value: float) -> float:
    return value if math.isnan(before) else _SMOOTH * before + (1 - _SMOOTH) * value


@contextmanager
def patient_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl+C only makes the function true; the second one interrupts."""
    pressed = threading.Event()

    def press(number: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
