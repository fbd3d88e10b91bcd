"""The numbers of a training run, kept beside its results so that a resumed run is the same run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["prompts", "data", "fit"]
STARTS = ("target", "random")
"""What a draft may start from beside another one."""
STAGES: tuple[Stage, ...] = ("prompts", "data", "fit")


@dataclass(frozen=True, slots=True)
class PromptsRecipe:
    """The first stage: what is asked."""

    seed: int = 0
    own: int = 6000
    """Prompts that the target writes."""
    file: str = ""
    """A JSONL file with more of them; its content, not its name, is compared on resuming."""
    held_out: int = 120
    """Prompts that are never trained on."""
    longest: int = 160
    """Tokens of a prompt's text at most."""
    rows: int = 64
    """Sequences that are written together."""


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """The second stage: what the target answers."""

    seed: int = 0
    answer_tokens: int = 256
    """Most tokens of an answer."""
    sampled: float = 0.2
    """Share of the answers that are drawn at ``temperature``; the others are greedy."""
    temperature: float = 0.7
    thinking: bool | None = None
    """Handed to templates that know it."""
    features: Literal["store", "recompute"] = "store"
    """Tapped states on the disk, or computed again for every batch of the fit."""
    taps: int = 5
    rows: int = 64


@dataclass(frozen=True, slots=True)
class FitRecipe:
    """The third stage: the draft and how it is fitted."""

    seed: int = 0
    layers: int = 4
    block: int = 8
    short_block: int = 4
    """Rows of a block in the first part of the training."""
    short_share: float = 0.4
    """That part, as a share of the steps."""
    v2: bool = False
    """With DFlash 2's convolutions and its candidate selector."""
    selector: bool = False
    """With the selector alone."""
    selector_rank: int = 32
    """Columns of the candidate selector's codebooks, where there is one."""
    draft_vocab: int | None = None
    """Ids that the draft can say, the most frequent ones of the answers; None is all of them."""
    others: tuple[str, ...] = ()
    """Folders of other trainings whose answers are learnt from too."""
    init: str = "target"
    """``target`` copies layers of the target, ``random`` none, a folder goes on from that draft."""
    steps: int | None = None
    minutes: float | None = 60.0
    """Where no steps are given: as many as the first ones promise in this time."""
    sequences: int = 16
    """Sequences of one step."""
    anchors: int = 24
    """Blocks drawn in each of them."""
    rate: float = 1e-3
    warm_up: float = 0.03
    """Share of the steps in which the learning rate rises."""
    decay: float = 0.01
    """Weight decay of the matrices."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    gamma: float = 4.0
    """The loss of a slot weighs ``exp(-(slot - 1) / gamma)``."""
    soft: float = 0.5
    """Share of the loss against the target's best probabilities; the rest is against its best."""
    loss_vocab: int = 12288
    """Ids that a step's loss is taken over: the frequent ones, and as a third a draw of others."""
    save_seconds: float = 60.0
    """A checkpoint at least this often."""
    eval_tokens: int = 128
    """Tokens per held-out answer in the last evaluation."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """All three stages."""

    prompts: PromptsRecipe = field(default_factory=PromptsRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    fit: FitRecipe = field(default_factory=FitRecipe)
