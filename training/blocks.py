"""What one step of the fit sees: sequences, and blocks whose anchors are drawn in the answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .corpus import Corpus

_SORTED = 16
"""Batches that are sorted by length together, so that little of a batch is padding."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences padded on the right, with the same number of blocks in each."""

    ids: torch.Tensor
    """``[sequences, length]``."""
    features: torch.Tensor | None
    """Tapped states, ``[sequences, length, width]``."""
    anchors: torch.Tensor
    """Positions of the blocks' anchors, ``[sequences, blocks]``."""
    before: torch.Tensor
    """The id ahead of each slot, ``[sequences, blocks, slots]``."""
    best_ids: torch.Tensor
    """The target's most probable ids at each slot, ``[sequences, blocks, slots, best]``."""
    best_probabilities: torch.Tensor
    """Theirs; 0 everywhere at slots behind the answer's end."""

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(
            self.ids.to(device),
            None if self.features is None else self.features.to(device),
            self.anchors.to(device),
            self.before.to(device),
            self.best_ids.to(device),
            self.best_probabilities.to(device),
        )


def order(corpus: Corpus, sequences: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch: every sequence once, those of like length together."""
    draws = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(corpus), generator=draws).tolist()
    batches = []
    span = sequences * _SORTED
    for start in range(0, len(shuffled), span):
        group = sorted(shuffled[start : start + span], key=corpus.length)
        batches += [group[i : i + sequences] for i in range(0, len(group), sequences)]
    return [batches[i] for i in torch.randperm(len(batches), generator=draws).tolist()]


def draw(corpus: Corpus, indices: list[int], anchors: int, block: int, seed: int) -> Batch:
    """A batch of these sequences with ``anchors`` blocks of ``block`` rows in each."""
    draws = torch.Generator().manual_seed(seed)
    longest = max(corpus.length(index) for index in indices)
    count, slots = len(indices), block - 1
    ids = torch.zeros((count, longest + slots), dtype=torch.long)
    places = torch.zeros((count, anchors), dtype=torch.long)
    best_ids: torch.Tensor | None = None
    features: torch.Tensor | None = None
    for row, index in enumerate(indices):
        length, prompt = corpus.length(index), corpus.prompt_length(index)
        ids[row, :length] = corpus.ids(index)
        chosen, mass = corpus.best(index)
        if best_ids is None:
            best_ids = torch.zeros((*ids.shape, chosen.shape[1]), dtype=torch.long)
            probabilities = torch.zeros(best_ids.shape)
        best_ids[row, prompt:length], probabilities[row, prompt:length] = chosen, mass
        # An anchor is an id of the answer with at least one more behind it.
        room = max(1, length - 1 - prompt)
        drawn = torch.randperm(room, generator=draws)[:anchors]
        if room < anchors:
            drawn = torch.cat((drawn, torch.randint(room, (anchors - room,), generator=draws)))
        places[row] = prompt + drawn
        states = corpus.features(index)
        if states is not None:
            if features is None:
                features = states.new_zeros((count, longest, states.shape[1]))
            features[row, :length] = states
    assert best_ids is not None
    at = places[:, :, None] + torch.arange(1, block)
    rows = torch.arange(count)[:, None, None]
    return Batch(
        ids=ids[:, :longest],
        features=features,
        anchors=places,
        before=ids[rows, at - 1],
        best_ids=best_ids[rows, at],
        best_probabilities=probabilities[rows, at],
    )
