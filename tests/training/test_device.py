"""Too little memory in a training is told in one line, whatever ran out of it."""

from __future__ import annotations

import pytest
import torch

from dflash_local.errors import EngineError
from dflash_local.training.device import memory_errors


def test_what_torch_raises_is_told() -> None:
    with pytest.raises(EngineError, match="smaller --rows"), memory_errors():
        torch.empty(2**60, dtype=torch.uint8)
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError()):
        with pytest.raises(EngineError, match="smaller --rows"), memory_errors():
            raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_errors():
        raise RuntimeError("shapes do not fit")
