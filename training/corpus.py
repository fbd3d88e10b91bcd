"""What the second stage wrote, read back: sequences, labels and tapped states by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash_local.errors import WeightsError


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sequence lies."""

    part: int
    start: int
    """Its first row among the ids of the part."""
    length: int
    prompt_length: int
    answer_start: int
    """Its first row among the labels of the part."""


class Corpus:
    """Every sequence of the finished parts.

    Args:
        paths: of the parts.

    Raises:
        WeightsError: a part is missing or damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._parts: list[Any] = []
        self._small: list[dict[str, torch.Tensor]] = []
        self._places: list[_Place] = []
        for number, path in enumerate(paths):
            try:
                handle: Any = safe_open(path, framework="pt")
                names = [name for name in handle.keys() if name != "features"]  # noqa: SIM118
                small = {name: handle.get_tensor(name) for name in names}
                lengths, prompts = small["lengths"].tolist(), small["prompt_lengths"].tolist()
                if len(small["ids"]) != sum(lengths) or "best_ids" not in small:
                    raise ValueError("its tensors do not fit together")
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                raise WeightsError(
                    f"{path} is damaged: {error}.", "Delete it and give the command again."
                ) from None
            self._parts.append(handle)
            self._small.append(small)
            start = answer = 0
            for length, prompt in zip(lengths, prompts, strict=True):
                self._places.append(_Place(number, start, length, prompt, answer))
                start, answer = start + length, answer + length - prompt

    def __len__(self) -> int:
        return len(self._places)

    def length(self, index: int) -> int:
        """Ids of a sequence."""
        return self._places[index].length

    def prompt_length(self, index: int) -> int:
        """Ids of its prompt."""
        return self._places[index].prompt_length

    @property
    def answer_tokens(self) -> int:
        """Answer tokens of all sequences."""
        return sum(place.length - place.prompt_length for place in self._places)

    def ids(self, index: int) -> torch.Tensor:
        """The ids of a sequence, ``[length]``."""
        place = self._places[index]
        ids = self._small[place.part]["ids"]
        return ids[place.start : place.start + place.length].long()

    def best(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's most probable ids and their probabilities, ``[answer, BEST]``."""
        place, small = self._places[index], self._small[self._places[index].part]
        rows = slice(place.answer_start, place.answer_start + place.length - place.prompt_length)
        return small["best_ids"][rows].long(), small["best_probabilities"][rows].float()

    def features(self, index: int) -> torch.Tensor | None:
        """Tapped states ``[length, width]``, where they were stored."""
        place = self._places[index]
        if "features" not in self._parts[place.part].keys():  # noqa: SIM118
            return None
        rows: torch.Tensor = self._parts[place.part].get_slice("features")[
            place.start : place.start + place.length
        ]
        return rows

    def counts(self, vocab_size: int) -> torch.Tensor:
        """How often each id is the target's best one, ``[vocab_size]``."""
        best = [small["best_ids"][:, 0].long() for small in self._small]
        return torch.bincount(torch.cat(best), minlength=vocab_size)

    def ranked(self, vocab_size: int, limit: int | None = None) -> torch.Tensor:
        """Ids by how often they are the target's best one, the most frequent first, ``[limit]``."""
        return self.counts(vocab_size).argsort(descending=True, stable=True)[:limit]

    def unused(self, vocab_size: int) -> torch.Tensor:
        """Which ids occur in no sequence, bool ``[vocab_size]``."""
        ids = torch.cat([small["ids"].long() for small in self._small])
        return torch.bincount(ids, minlength=vocab_size) == 0
