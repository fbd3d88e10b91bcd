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


def load_model(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A causal language model in eval mode, with our attention function.

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
    return model.eval().to(device)
