"""Products with fp16 weights, for CPUs that would otherwise compute a target in fp32."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from dflash_local.free_memory import cpu_halves


def quicken(model: nn.Module) -> None:
    """Let the model's products read their weights in fp16; states and sums stay fp32.

    64 rows of the demo target's products take 165 instead of 220 ms so (AVX2, one thread). Weights
    that were published in bf16 are kept exactly but for what lies below 2**-17. The fp32 ones stay
    beside them for who asks for them, so this takes half as much memory again. Nothing happens
    where torch lacks these products, on other than fp32 weights, and to what fp16 cannot hold.
    """
    if not has_half_products():
        return
    for module in model.modules():
        if isinstance(module, nn.Linear) and _only_multiplies(module) and _fits(module.weight):
            packed = torch.ops.quantized.linear_prepack_fp16(module.weight, module.bias)
            module.forward = partial(_product, packed)  # type: ignore[method-assign]


def has_half_products() -> bool:
    """Whether this CPU and this build of torch have them."""
    return cpu_halves() and torch.backends.quantized.engine in ("x86", "fbgemm")


def _only_multiplies(module: nn.Linear) -> bool:
    """A subclass may do more: a router also chooses."""
    return type(module).forward is nn.Linear.forward


def _fits(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and float(weight.detach().abs().max()) <= torch.finfo(torch.float16).max
    )


def _product(packed: torch.ScriptObject, states: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(states, packed)
    return product
