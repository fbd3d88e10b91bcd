"""Second stage: the target answers, and what it saw on the way is kept in numbered parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dflash_local.bench import loops
from dflash_local.prompting import ChatTokenizer, build_prompt

from .files import part, whole, write_tensors
from .prompts import Asked
from .recipe import DataRecipe
from .teacher import Teacher
from .writer import BEST, Written, write

Progress = Callable[[int, int], None]

_LOOP = 48
"""An answer is cut once its last so many ids repeat a short pattern: loops teach nothing."""


def bytes_needed(recipe: DataRecipe, prompts: int, width: int, longest: int) -> int:
    """What the parts may take on the disk at most; half of it is usual."""
    per_token = 4 + BEST * 6 + (2 * width if recipe.features == "store" else 0)
    return prompts * (longest + recipe.answer_tokens) * per_token


def batches(recipe: DataRecipe, prompts: int) -> int:
    """How many parts so many prompts make."""
    return -(-prompts // recipe.rows)


def missing(folder: Path, recipe: DataRecipe, prompts: int) -> list[int]:
    """Numbers of the parts that are still to be written."""
    return [
        n for n in range(batches(recipe, prompts)) if not whole(part(folder, n, ".safetensors"))
    ]


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
    for number in numbers:
        progress(number, total)
        path = part(folder, number, ".safetensors")
        asked = prompts[number * recipe.rows : (number + 1) * recipe.rows]
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
        )
        write_tensors(path, _tensors([_without_loop(answer) for answer in written]))
    progress(total, total)


def _without_loop(written: Written) -> Written:
    """The same up to where its answer only repeats itself."""
    start = written.prompt_length
    for end in range(start + _LOOP, len(written.ids), 8):
        if loops(written.ids[start:end], _LOOP):
            count = end - start
            return Written(
                written.ids[:end],
                start,
                False,
                written.best_ids[:count],
                written.best_probabilities[:count],
                None if written.features is None else written.features[:end],
            )
    return written


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
