"""The numbers of a training run, kept beside its results so that a resumed run is the same run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dflash_local.errors import OptionError
from dflash_local.hub_cache import write_text

Stage = Literal["prompts", "data", "fit"]
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
    selector_rank: int = 32
    """Columns of the candidate selector's codebooks, where ``v2`` is set."""
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


_FREE = ("rate", "clip", "save_seconds", "eval_tokens", "file")
"""Numbers that may change when a run is resumed."""


def hold(folder: Path, part: PromptsRecipe | DataRecipe | FitRecipe, **facts: object) -> None:
    """Write a stage's numbers into its folder, or compare with those of the run to be resumed.

    ``facts`` are compared too: what the stage depends on besides its numbers.

    Raises:
        OptionError: the folder holds a run with other numbers.
    """
    now: dict[str, Any] = {**asdict(part), **facts}
    path = folder / "recipe.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(now, indent=1))
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for name in (*(f.name for f in fields(part)), *facts):
        if name not in _FREE and before.get(name) != now[name]:
            raise OptionError(
                f"{folder} was begun with {name} {before.get(name)!r}, now it is {now[name]!r}.",
                "Give the same options to resume, or another --out.",
            )
