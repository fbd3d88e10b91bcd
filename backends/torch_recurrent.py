"""States of Gated DeltaNet layers, which cannot be cropped: kept, replayed, or gone back to a mark.

A forward reads the states that count and leaves new ones aside, so a rejected block costs
nothing. Where only some of its rows are kept, the recurrent layers alone run again on the inputs
that they had; attention, experts and heads do not.
"""

from __future__ import annotations

from typing import Any

import torch

_States = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Per layer the convolution's window ``[1, channels, kernel - 1]`` and the matrix state."""


class RecurrentStates:
    """The states of every recurrent layer; handed to transformers as a cache."""

    def __init__(self) -> None:
        self._modules: dict[int, Any] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._states: _States = {}
        self._windows: dict[int, torch.Tensor] = {}
        self._new: _States = {}
        self._marked: tuple[int, _States] = (0, {})

    def attach(self, layer: int, module: Any) -> Any:
        """Watch a layer's recurrent module; returns the hook's handle."""
        self._modules[layer] = module

        def note(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs[layer] = args[0] if args else kwargs["hidden_states"]

        return module.register_forward_pre_hook(note, with_kwargs=True)

    @property
    def bytes(self) -> int:
        """Size of the states, the new ones and the mark included."""
        held = (*self._states.values(), *self._new.values(), *self._marked[1].values())
        return sum(t.numel() * t.element_size() for pair in held for t in pair)

    def keep(self, rows: int, begun: int) -> None:
        """Make the state after the first ``rows`` of ``begun`` rows count."""
        if rows < begun:
            for layer, inputs in list(self._inputs.items()):
                self._modules[layer](
                    hidden_states=inputs[:, :rows], cache=self, attention_mask=None
                )
        self._states = dict(self._new)
        self._inputs.clear()
        self._windows.clear()

    def mark(self, length: int) -> None:
        """Remember the states after ``length`` rows. They are never changed in place, so this
        copies nothing."""
        self._marked = (length, dict(self._states))

    def reach(self, length: int) -> int:
        """The greatest length up to ``length`` whose states are known."""
        return self._marked[0] if self._marked[0] <= length else 0

    def go_back(self, length: int) -> None:
        """Take up the states of ``length`` rows, the mark or 0."""
        if length != self._marked[0]:
            self._marked = (0, {})
        self._states = dict(self._marked[1])
        self._new = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The convolution's window; None before the first row."""
        return self._states[layer_idx][0] if layer_idx in self._states else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The matrix state; None before the first row."""
        return self._states[layer_idx][1] if layer_idx in self._states else None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, **kwargs: Any
    ) -> torch.Tensor:
        """The window followed by new columns ``[1, channels, rows]``."""
        kernel = int(kwargs["conv_kernel_size"])
        before = self.get_conv_state(layer_idx)
        if before is None:
            before = conv_states.new_zeros((*conv_states.shape[:-1], kernel - 1))
        full = torch.cat((before, conv_states), dim=-1)
        self._windows[layer_idx] = full[..., full.shape[-1] - (kernel - 1) :]
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: Any
    ) -> torch.Tensor:
        """Put the new state aside until its rows are kept."""
        self._new[layer_idx] = (self._windows[layer_idx].clone(), recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: a forward must not change the window in place."""
        return True
