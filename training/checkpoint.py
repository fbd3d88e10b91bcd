"""A fit's state between two steps, in one safetensors file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dflash_local.errors import WeightsError

from .files import write_tensors


@dataclass(slots=True)
class Progress:
    """How far a fit is."""

    step: int = 0
    steps: int = 0
    """In all; 0 until the first steps have shown how long one takes."""
    seconds: float = 0.0
    """Of training, over all runs."""
    history: list[tuple[int, float, float, float]] = field(default_factory=list)
    """At each checkpoint: step, seconds, loss and tau on the blocks trained on."""


def save(
    path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Replace the checkpoint."""
    tensors = {f"model/{name}": tensor for name, tensor in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}/{name}"] = value
    write_tensors(path, tensors, {"progress": json.dumps(asdict(progress))})


def load(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Bring network and optimizer to where the checkpoint is; without one, do nothing.

    Raises:
        WeightsError: it is damaged, or of another network.
    """
    if not path.is_file():
        return Progress()
    try:
        with safe_open(path, framework="pt") as handle:
            facts = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        network.load_state_dict(
            {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model/")}
        )
        progress = Progress(**json.loads(facts["progress"]))
        moments = {
            parameter: {key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            for name, parameter in network.named_parameters()
        }
    except (SafetensorError, OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise WeightsError(
            f"{path} cannot be resumed from: {error}", "Delete it to fit from the start."
        ) from None
    for parameter, states in moments.items():
        optimizer.state[parameter] = {
            key: value.to("cpu" if key == "step" else parameter.device)
            for key, value in states.items()
        }
    return progress
