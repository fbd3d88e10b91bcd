"""Another training of the same target, whose answers are learnt from too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from dflash_local.errors import OptionError

from .answers import batches
from .files import whole
from .prompts import key, read_prompts
from .recipe import DataRecipe
from .workplace import MARK, fingerprint, held


@dataclass(frozen=True, slots=True)
class Earlier:
    """What its folder holds."""

    parts: tuple[Path, ...]
    """Of the answers."""
    learnt: frozenset[str]
    """``key`` of every prompt that was answered."""
    held_out: frozenset[str]
    """Of those that must not be: a draft of both is to be measured by them too."""
    digest: str
    """Tells such trainings apart."""


def check_folders(folders: Sequence[Path], out: Path) -> None:
    """Refuse a training that would be learnt from twice.

    Raises:
        OptionError: which one.
    """
    seen = {out.resolve(): "is the --out itself"}
    for folder in folders:
        place = folder.resolve()
        if place in seen:
            raise OptionError(f"--with {folder} {seen[place]}.", "Leave it out.")
        seen[place] = "is given twice"


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
    prompts = read_prompts(train)
    rows = max(1, int(facts.get("rows") or 1))
    expected = batches(replace(recipe, rows=rows), len(prompts))
    if len(parts) < expected:
        raise OptionError(
            f"--with {folder} has {len(parts)} of the {expected} parts of its answers.",
            "Let that training finish them, with --stage data.",
        )
    apart = folder / "prompts" / "held_out.jsonl"
    held_out = read_prompts(apart) if apart.is_file() else []
    sizes = [(path.name, path.stat().st_size) for path in parts]
    return Earlier(
        parts,
        frozenset(key(asked.text) for asked in prompts),
        frozenset(key(asked.text) for asked in held_out),
        sha256(repr((facts.get("prompts"), sizes)).encode()).hexdigest()[:16],
    )
