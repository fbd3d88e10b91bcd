"""Another training of the same target, whose answers are learnt from too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dflash_local.errors import OptionError

from .files import whole
from .prompts import key, read_prompts
from .recipe import DataRecipe
from .workplace import MARK, fingerprint, held


@dataclass(frozen=True, slots=True)
class Earlier:
    """What its folder holds."""

    parts: tuple[Path, ...]
    """Of the answers."""
    asked: frozenset[str]
    """``key`` of every prompt that may have been answered."""
    digest: str
    """Tells such trainings apart."""


def read_earlier(folder: Path, target: Path, recipe: DataRecipe, taps: Sequence[int]) -> Earlier:
    """Read the folder that another training had as ``--out``.

    Args:
        folder: where it is.
        target: this training's target.
        recipe: of this training's answers.
        taps: its tapped layers.

    Raises:
        OptionError: there are no answers, or none that fit beside this training's.
    """
    mark, facts = held(folder / MARK), held(folder / "data" / "recipe.json")
    parts = tuple(sorted((folder / "data").glob("part-*.safetensors")))
    train = folder / "prompts" / "train.jsonl"
    if mark is None or facts is None or not parts or not train.is_file():
        raise OptionError(
            f"--with {folder} holds no answers of a training.",
            "Give a folder that was the --out of one.",
        )
    damaged = next((path for path in parts if not whole(path)), None)
    if damaged is not None:
        raise OptionError(
            f"{damaged} is damaged.", "Delete it and run that training's --stage data again."
        )
    wanted = {"target": fingerprint(target), "tap_layers": list(taps), "features": recipe.features}
    for name, ours in wanted.items():
        theirs = (mark | facts).get(name)
        if theirs != ours:
            what = "is for another target" if name == "target" else f"has {name} {theirs!r}"
            advice = "Leave it out" if name == "target" else f"Give what makes it {theirs!r} here"
            raise OptionError(f"--with {folder} {what}, not {ours!r}.", f"{advice}.")
    sizes = [(path.name, path.stat().st_size) for path in parts]
    return Earlier(
        parts,
        frozenset(key(asked.text) for asked in read_prompts(train)),
        sha256(repr((facts.get("prompts"), sizes)).encode()).hexdigest()[:16],
    )
