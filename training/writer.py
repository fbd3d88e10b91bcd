"""Writes many sequences at once, as the target would, and keeps what a draft learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash_local.bench import loops

from .teacher import Teacher

BEST = 8
"""How many of the target's most probable ids are kept for each position."""

_NUCLEUS = 1024
_COLDEST = 1e-6
"""Colder, logits would leave fp32; only the best id is drawn long before."""
_LEAVE = 0.125
"""Rows that are finished leave the batch when they are this share of it."""
_LOOP = 48
"""A sequence ends once its last so many ids repeat a short pattern: loops teach nothing."""
_LOOK = 8
"""Ids between two looks for that; a divisor of ``_LOOP``."""

_STEP = 32
"""Rows by which K/V buffers grow."""


@dataclass(frozen=True, slots=True)
class Written:
    """One sequence."""

    ids: list[int]
    """Prompt and answer."""
    prompt_length: int
    finished: bool
    """Whether it ended by itself, not at the limit."""
    best_ids: torch.Tensor
    """int32 ``[answer, BEST]``: the target's most probable ids for each answer position."""
    best_probabilities: torch.Tensor
    """fp16, likewise."""
    features: torch.Tensor | None
    """Tapped states ``[len(ids), width]``; those of the last id, which was never read, are 0."""


@torch.inference_mode()
def write(
    teacher: Teacher,
    prompts: Sequence[Sequence[int]],
    *,
    most: int,
    stop_ids: frozenset[int],
    temperatures: Sequence[float],
    seed: int,
    top_p: float = 1.0,
    tap: bool = False,
    tell: Callable[[str], None] = lambda note: None,
) -> list[Written]:
    """Continue every prompt until a stop id, a loop or ``most`` tokens.

    The rows are padded on the left to one length, and rows that are finished leave the batch.

    Args:
        teacher: the target.
        prompts: ids, at least one each.
        most: tokens to add at most.
        stop_ids: ids that end a sequence; they are part of it.
        temperatures: one per prompt; 0 takes the most probable id.
        seed: of the draws.
        top_p: share of the probability that is drawn from.
        tap: keep the tapped states.
        tell: called at every token with words on how far the rows are.
    """
    device = teacher.device
    draws = torch.Generator(device).manual_seed(seed)
    longest = max(len(prompt) for prompt in prompts)
    pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    ids = torch.zeros((len(prompts), longest), dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=device)
    heats = torch.tensor(temperatures, device=device)
    all_hot = min(temperatures) > 0  # then no row has to be picked out, or looked for
    stops = torch.tensor(sorted(stop_ids), device=device)
    room = longest + most
    said = torch.zeros((len(prompts), most), dtype=torch.long, device=device)
    lengths = torch.full((len(prompts),), most, device=device)
    best_ids = torch.zeros((len(prompts), most, BEST), dtype=torch.int32, device=device)
    best = torch.zeros((len(prompts), most, BEST), dtype=torch.float16, device=device)
    width = teacher.width if tap else 0
    states = torch.zeros((len(prompts), room, width), dtype=torch.bfloat16, device=device)
    rows = torch.arange(len(prompts), device=device)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    cache = _roomy_cache(teacher)
    # Rows of a recurrent layer's state cannot be left out; there all rows stay to the end.
    may_leave = all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
    # Layers that share K/V would compute the last row only, and taps need all of them.
    logits_rows = 0 if tap and getattr(teacher.config, "num_kv_shared_layers", None) else 1
    step_ids, done = ids, 0
    with teacher.tapping() as tapped:
        for index in range(most):
            seen = done + step_ids.shape[1]
            places = torch.arange(seen, device=device)
            visible = (places[None, :] >= pads[rows][:, None]).long()
            positions = (places[None, done:] - pads[rows][:, None]).clamp(min=0)
            output = teacher.model(
                input_ids=step_ids,
                attention_mask=visible,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=logits_rows,
            )
            if tap:
                states[rows, done:seen] = tapped().to(torch.bfloat16)
            done = seen
            logits = output.logits[:, -1].float()
            values, chosen = logits.topk(min(BEST, logits.shape[-1]), dim=-1)
            kept = values.shape[-1]
            best_ids[rows, index, :kept] = chosen.int()
            mass = (values - logits.logsumexp(-1, keepdim=True)).exp()
            best[rows, index, :kept] = mass.to(torch.float16)
            token = chosen[:, 0].clone()
            hot = heats[rows] > 0
            if all_hot:
                token = _draw(logits, heats[rows], top_p, draws)
            elif bool(hot.any()):
                token[hot] = _draw(logits[hot], heats[rows][hot], top_p, draws)
            said[rows, index] = token
            count = index + 1
            tell(f"the next ones: token {count} of {most}")
            ends = torch.isin(token, stops) & alive
            if count >= _LOOP and count % _LOOK == 0:
                tails = said[rows, count - _LOOP : count].tolist()
                ends |= torch.tensor([loops(tail, _LOOP) for tail in tails], device=device) & alive
            lengths[rows[ends]] = count
            alive &= ~ends
            if not bool(alive.any()):
                break
            if may_leave and bool((~alive).sum() >= _LEAVE * len(rows)):
                stay = alive.nonzero()[:, 0]
                cache.batch_select_indices(stay)
                rows, token, alive = rows[stay], token[stay], alive[stay]
            step_ids = token[:, None]
    return [
        Written(
            ids=[*prompt, *said[row, :length].tolist()],
            prompt_length=len(prompt),
            finished=int(said[row, length - 1]) in stop_ids,
            best_ids=best_ids[row, :length].cpu(),
            best_probabilities=best[row, :length].cpu(),
            features=_features(states[row], int(pads[row]), len(prompt) + length) if tap else None,
        )
        for row, prompt in enumerate(prompts)
        for length in [int(lengths[row])]
    ]


def _draw(
    logits: torch.Tensor, heats: torch.Tensor, top_p: float, draws: torch.Generator
) -> torch.Tensor:
    """One id per row from ``logits`` ``[rows, vocab]``, by one number each: a number per id, as the
    library draws, takes a tenth of a step. A nucleus ends after ``_NUCLEUS`` ids at the latest."""
    heats = heats[:, None].clamp(min=_COLDEST)
    places = None
    if top_p < 1.0:
        # The rest of the vocabulary is read once, for its mass.
        mass = (logits / heats).logsumexp(-1, keepdim=True)
        logits, places = logits.topk(min(_NUCLEUS, logits.shape[-1]), dim=-1)
        chances = (logits / heats - mass).exp_()
        chances[chances.cumsum(-1) - chances >= top_p] = 0.0
    else:
        chances = (logits / heats).softmax(-1)
    sums = chances.cumsum(-1)
    shots = torch.rand(len(sums), 1, generator=draws, device=sums.device) * sums[:, -1:]
    drawn = torch.searchsorted(sums, shots, right=True).clamp_(max=sums.shape[-1] - 1)
    return (drawn if places is None else places.gather(-1, drawn))[:, 0]


def _features(states: torch.Tensor, pad: int, length: int) -> torch.Tensor:
    """The states of a row's own positions, those of the last one cleared."""
    own = states[pad : pad + length].cpu().clone()
    own[-1] = 0
    return own


def _roomy_cache(teacher: Teacher) -> DynamicCache:
    """transformers' cache; layers that keep everything write into one buffer."""
    cache = DynamicCache(config=teacher.config)
    cache.layers = [
        _RoomyLayer(teacher.whole_columns) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


class _RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """K and V in buffers that grow now and then, instead of a copy of everything at every step.

    Args:
        whole: show the buffers to their end, the library's mask hides what is not written; else up
            to the last row, and there are gaps between the sequences.
    """

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self._whole = whole
        self._filled = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows ``[batch, heads, rows, dim]`` and return all."""
        fresh = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [t[:, :, :0] for t in fresh]
        end = self._filled + key_states.shape[2]
        spare = _grown(end) - self._buffers[0].shape[2]
        if spare > 0:
            # What is not written is weighed with 0, so it must be a number.
            self._buffers = [F.pad(buffer, (0, 0, 0, spare)) for buffer in self._buffers]
        for buffer, rows in zip(self._buffers, fresh, strict=True):
            buffer[:, :, self._filled : end] = rows
        self._filled = end
        self._show()
        return self.keys, self.values

    def _show(self) -> None:
        columns = self._buffers[0].shape[2] if self._whole else self._filled
        self.keys, self.values = (buffer[:, :, :columns] for buffer in self._buffers)

    def get_seq_length(self) -> int:
        """Rows that were written."""
        return self._filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that the next forward's attention gets, and the position of the first."""
        end = self._filled + query_length
        return _grown(end) if self._whole else end, 0

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences."""
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._show()


def _grown(rows: int) -> int:
    """Rows of a buffer that holds so many."""
    return -(-rows // _STEP) * _STEP
