"""Loads a decoder through transformers, for the families without a lean forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from dflash_local.errors import WeightsError

from . import torch_attention
from .torch_linear import Linear, LinearMaker, dense


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing while it loads; what it finds is reported as errors."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


class ProductModule(torch.nn.Module):
    """A product in the place of a linear layer of transformers."""

    def __init__(self, product: Linear) -> None:
        super().__init__()
        self.product = product

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """The product for states ``[..., columns]``."""
        out = self.product(states.reshape(-1, states.shape[-1]))
        return out.view(*states.shape[:-1], -1)


def load_model(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    body: LinearMaker = dense,
    head: LinearMaker = dense,
) -> Any:
    """A causal language model in eval mode, with our attention function.

    It is read into the machine's memory and quantised layer by layer on its way to the device.

    Raises:
        WeightsError: tensors are missing or damaged.
    """
    try:
        with _quiet():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=torch_attention.register(),
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise WeightsError(
            f"{folder} cannot be loaded: {error}", "Pull the model again."
        ) from error
    problems = [*report["missing_keys"], *(str(k) for k in report.get("mismatched_keys", ()))]
    if problems:
        raise WeightsError(f"{folder} lacks {sorted(problems)[0]}.", "Pull the model again.")
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    if body is not dense:
        _replace(decoder, body, device)
    if head is not dense:
        model.set_output_embeddings(ProductModule(head("head", output.weight.to(device))))
    return model.eval().to(device)


def _replace(decoder: torch.nn.Module, maker: LinearMaker, device: torch.device) -> None:
    """Store every linear layer of a decoder as the maker does; experts are no linear layers."""
    for path, module in list(decoder.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) is not torch.nn.Linear:
                continue
            added: torch.Tensor | None = getattr(child, "bias", None)
            bias = None if added is None else added.data.to(device)
            product = maker(f"{path}.{name}", child.weight.data.to(device), bias)
            setattr(module, name, ProductModule(product))
