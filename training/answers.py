"""Second stage: the target answers, and what it saw on the way is kept in numbered parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from dflash_local.errors import WeightsError
from dflash_local.prompting import ChatTokenizer, build_prompt

from .files import part, whole, write_tensors
from .prompts import Asked, Progress
from .recipe import DataRecipe
from .teacher import Teacher
from .writer import BEST, Written, write

ORDER = "by length"
"""How prompts are dealt to parts; parts dealt otherwise must not be mixed with them."""


def bytes_needed(recipe: DataRecipe, prompts: int, width: int, longest: int) -> int:
    """What the parts may take on the disk at most; half of it is usual."""
    per_token = 4 + BEST * 6 + (2 * width if recipe.features == "store" else 0)
    return prompts * (longest + recipe.answer_tokens) * per_token


def batches(recipe: DataRecipe, prompts: int) -> int:
    """How many parts so many prompts make."""
    return -(-prompts // recipe.rows)


def missing(folder: Path, recipe: DataRecipe, prompts: int) -> list[int]:
    """Numbers of the parts that are still to be written."""
    return [n for n, path in enumerate(parts(folder, recipe, prompts)) if not whole(path)]


def parts(folder: Path, recipe: DataRecipe, prompts: int) -> list[Path]:
    """The files of so many prompts' answers."""
    return [part(folder, n, ".safetensors") for n in range(batches(recipe, prompts))]


def make_answers(
    folder: Path,
    recipe: DataRecipe,
    prompts: Sequence[Asked],
    numbers: Sequence[int],
    teacher: Callable[[], Teacher],
    tokenizer: ChatTokenizer,
    progress: Progress,
) -> None:
    """Answer the prompts of the parts with these numbers, as ``missing`` tells them."""
    total = batches(recipe, len(prompts))
    # Prompts of like length together: the shorter ones of a batch are padded to the longest.
    by_length = sorted(prompts, key=lambda asked: len(asked.text))
    order = random.Random(recipe.seed).sample(range(total), total)
    for number in numbers:
        progress(number, total, "")
        path = part(folder, number, ".safetensors")
        first = order[number] * recipe.rows
        asked = by_length[first : first + recipe.rows]
        draw = random.Random(f"{recipe.seed} {number}")
        heats = [recipe.temperature if draw.random() < recipe.sampled else 0.0 for _ in asked]
        target = teacher()
        vocab = len(target.head)
        written = write(
            target,
            [build_prompt(tokenizer, vocab, a.text, recipe.thinking).ids for a in asked],
            most=recipe.answer_tokens,
            stop_ids=frozenset(tokenizer.stop_ids),
            temperatures=heats,
            seed=draw.getrandbits(62),
            tap=recipe.features == "store",
            tell=partial(progress, number, total),
        )
        if any(bool(answer.best_probabilities.isnan().any()) for answer in written):
            raise WeightsError(
                "The target computes what is no number.", "Its weights are damaged: pull it again."
            )
        write_tensors(path, _tensors(written))
    progress(total, total, "")


def _tensors(written: Sequence[Written]) -> dict[str, torch.Tensor]:
    """One part: the sequences behind each other."""
    tensors = {
        "ids": torch.tensor([token for w in written for token in w.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(w.ids) for w in written], dtype=torch.int32),
        "prompt_lengths": torch.tensor([w.prompt_length for w in written], dtype=torch.int32),
        "best_ids": torch.cat([w.best_ids for w in written]),
        "best_probabilities": torch.cat([w.best_probabilities for w in written]),
    }
    features = [w.features for w in written if w.features is not None]
    if features:
        tensors["features"] = torch.cat(features)
    return tensors
