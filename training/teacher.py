"""The target as the trainer needs it: whole batches, tapped layers, its embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from dflash_local.errors import WeightsError
from dflash_local.weights import folder_shapes, read_json, refuse_own_code

from .halves import quicken
from .rows import take_rows_apart


class Teacher:
    """A frozen target.

    Args:
        folder: where it lies.
        taps: layers whose output is kept, in the order of concatenation.
        device: where it is to run.
        dtype: what it computes in.

    Raises:
        WeightsError: files are missing or damaged, or want to run code of their own.
    """

    def __init__(
        self, folder: Path, taps: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        refuse_own_code(read_json(folder / "config.json"), folder)
        folder_shapes(folder)
        transformers.utils.logging.disable_progress_bar()
        try:
            self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
            )
        except Exception as error:  # a library stumbles over odd files in ways of its own
            raise WeightsError(
                f"{folder} cannot be loaded: {type(error).__name__}: {error}.", "Pull it again."
            ) from error
        self.model.eval().requires_grad_(False).to(device)
        # A slice of the states, as the last position is, would be multiplied by a copy of the head
        # per sequence: 64 of the demo target's took 4 seconds.
        head: Any = self.model.get_output_embeddings()
        if head is None:
            raise WeightsError(
                f"{type(self.model).__name__} has no output head that a draft could use.",
                "Train for another target.",
            )
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(), *inputs[1:]))
        quicken(self.model)
        self.whole_columns = take_rows_apart(self.model)
        """Whether attention wants K/V without gaps between the sequences, at any price."""
        self.config: Any = self.model.config.get_text_config(decoder=True)
        self.device = device
        self.taps = tuple(taps)
        self._layers: Any = getattr(self.model.get_decoder(), "layers", None)
        if self._layers is None:
            raise WeightsError(
                f"The layers of {type(self.model).__name__} are not where they can be tapped.",
                "Train for another target.",
            )
        self._states: dict[int, torch.Tensor] = {}

    @property
    def width(self) -> int:
        """Size of the tapped states of one position."""
        return len(self.taps) * int(self.config.hidden_size)

    @property
    def head(self) -> torch.Tensor:
        """The output head's matrix, ``[vocab, hidden]``."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The input embedding as the target's first layer gets it, ``[..., hidden]``."""
        embedded: torch.Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def named_layer(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of one decoder layer under their names within it."""
        return dict(self._layers[index].state_dict())

    @contextmanager
    def tapping(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Inside, the function gives the last forward's tapped states, ``[..., width]``."""

        def keep(index: int) -> Callable[..., None]:
            def hook(module: torch.nn.Module, inputs: object, output: Any) -> None:
                self._states[index] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self._layers[index].register_forward_hook(keep(index)) for index in self.taps]
        try:
            yield lambda: torch.cat([self._states[index] for index in self.taps], dim=-1)
        finally:
            for handle in handles:
                handle.remove()
            self._states.clear()

    @torch.inference_mode()
    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """Tapped states ``[sequences, length, width]`` of ids that are padded on the right."""
        with self.tapping() as tapped:
            self.model.get_decoder()(input_ids=ids, use_cache=False)
            return tapped()
