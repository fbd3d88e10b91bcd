"""NF4 and int8 weights through bitsandbytes, quantised one at a time while a model loads."""

from __future__ import annotations

import ctypes
import math
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from dflash_local.errors import BackendUnavailable, OptionError, how_to_install

from .torch_bnb import bitsandbytes
from .torch_linear import Linear, LinearMaker, dense, tensor_bytes
from .torch_prequant import BLOCK, PackedWeight

SCHEMES = ("nf4", "int8", "none")

BITS = {4: "nf4", 8: "int8", 16: "none"}
"""What a number of bits per weight means."""


class Nf4Linear:
    """Four bits per weight and a scale per 64 of a row.

    The fused kernels are called without their module: that would cost about as much host time
    as the product itself takes for a few rows.
    """

    def __init__(
        self, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
    ) -> None:
        bnb = bitsandbytes()

        rows, columns = weight.shape
        module: Any = bnb.nn.Linear4bit(
            columns,
            rows,
            bias=False,
            compute_dtype=torch.bfloat16,
            compress_statistics=False,
            quant_type="nf4",
            device="meta",
        )
        stored: dict[str, Any] = {"data": weight}
        if isinstance(weight, PackedWeight):
            stored = {"data": weight.packed, "quant_state": weight.state, "bnb_quantized": True}
        module.weight = bnb.nn.Params4bit(
            **stored,
            requires_grad=False,
            compress_statistics=False,
            quant_type="nf4",
            module=module,
        )
        module = module.to(module.weight.device).eval()
        if module.weight.device.type == "cpu":
            # Its first forward brings the weight into the layout of the fused CPU kernel.
            with torch.inference_mode():
                module(torch.zeros(1, columns, dtype=torch.bfloat16))
        state = module.weight.quant_state
        self._shape = (rows, columns)
        self._packed: torch.Tensor = module.weight.data
        self._scales: torch.Tensor = state.absmax
        self._code: torch.Tensor = state.code
        self._bias = bias
        self._fused_cpu = bool(getattr(state, "packing_format_for_cpu", False))
        if not self._fused_cpu:
            self._packed = self._packed.view(-1, 1)
        operators: Any = torch.ops.bitsandbytes
        self._gemv = operators.gemv_4bit.default
        self._kernel = _cpu_kernel() if self._fused_cpu else None
        self._gemm = operators.gemm_4bit.default

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product."""
        out: torch.Tensor
        if self._kernel is not None and states.dtype == torch.bfloat16:
            return self._direct(self._kernel, states)
        if self._fused_cpu:
            out = self._gemv(states, self._packed, self._shape, self._scales, self._code, BLOCK)
            return out if self._bias is None else out.add_(self._bias)
        out = self._gemm(
            states, self._packed, self._shape, self._scales, BLOCK, "nf4", bias=self._bias
        )
        return out

    def _direct(self, kernel: Any, states: torch.Tensor) -> torch.Tensor:
        """The CPU kernel without its operator, which takes 10 us and reads a tensor each time."""
        rows, columns = self._shape
        states = states.contiguous()
        out = torch.empty(states.shape[0], rows, dtype=torch.bfloat16)
        whole, place = ctypes.c_int64, ctypes.c_void_p
        kernel(
            whole(states.shape[0]),
            whole(rows),
            whole(columns),
            place(states.data_ptr()),
            place(self._packed.data_ptr()),
            place(self._scales.data_ptr()),
            place(out.data_ptr()),
            whole(BLOCK),
            whole(columns),
            whole(rows),
        )
        return out if self._bias is None else out.add_(self._bias)

    @property
    def bytes(self) -> int:
        """Size of weight, scales and bias."""
        return tensor_bytes(self._packed, self._scales, self._bias)


class Int8Linear:
    """Eight bits per weight and a scale per output; inputs are quantised row by row.

    No outliers are kept apart: looking for them would make the host wait for every product.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        operators: Any = _bitsandbytes_operators()
        self._quantise = operators.int8_vectorwise_quant.default
        self._product = operators.int8_scaled_mm.default
        self._weight, self._scales, _ = self._quantise(weight.half(), 0.0)
        self._bias = bias

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product."""
        values, scales, _ = self._quantise(states.half(), 0.0)
        out: torch.Tensor = self._product(
            values, self._weight, scales, self._scales, None, torch.float16
        )
        out = out.to(states.dtype)
        return out if self._bias is None else out.add_(self._bias)

    @property
    def bytes(self) -> int:
        """Size of weight, scales and bias."""
        return tensor_bytes(self._weight, self._scales, self._bias)


class Quantiser:
    """Makers of products for the parts of a pair, and the record of what they left alone.

    ``plain`` stores what is not quantised.
    """

    def __init__(self, plain: LinearMaker = dense) -> None:
        self._plain = plain
        self.refused: list[str] = []
        """Products that no kernel takes, with the reason; they stay as they were."""
        self.quantised_weights = 0
        self.quantised_bytes = 0

    def maker(self, scheme: str) -> LinearMaker:
        """The maker for ``nf4``, ``int8`` or ``none``.

        Raises:
            OptionError: there is no such scheme.
            BackendUnavailable: bitsandbytes is missing.
        """
        if scheme not in SCHEMES:
            raise OptionError(
                f"There is no quantisation {scheme!r} on this backend.",
                f"Give one of {', '.join(SCHEMES)}.",
            )
        if scheme == "none":
            return self._plain
        if find_spec("bitsandbytes") is None:
            raise BackendUnavailable(
                "Quantising needs bitsandbytes, which is not installed here.",
                f"{how_to_install('cuda').removesuffix('.')}; or give --quantize none.",
            )
        _bitsandbytes_operators()

        def make(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
            reason = refusal(scheme, tuple(weight.shape), weight.device)
            if reason is not None:
                self.refused.append(f"{name}: {reason}")
                return self._plain(name, weight, bias)
            made: Linear = (Nf4Linear if scheme == "nf4" else Int8Linear)(weight, bias)
            return self._counted(made, weight.numel(), bias)

        return make

    def packed(self, name: str, weight: PackedWeight, bias: torch.Tensor | None = None) -> Linear:
        """The product of a weight that is in NF4 already."""
        reason = refusal("nf4", weight.shape, weight.packed.device)
        if reason is not None:
            self.refused.append(f"{name}: {reason}")
            dtype = torch.bfloat16 if bias is None else bias.dtype
            return self._plain(name, weight.dense(dtype), bias)
        return self._counted(Nf4Linear(weight, bias), math.prod(weight.shape), bias)

    def _counted(self, made: Linear, weights: int, bias: torch.Tensor | None) -> Linear:
        self.quantised_weights += weights
        self.quantised_bytes += made.bytes - tensor_bytes(bias)
        return made


def refusal(scheme: str, shape: tuple[int, ...], device: torch.device) -> str | None:
    """Why a scheme's kernels do not take a weight ``[outputs, columns]``; None where they do."""
    rows, columns = shape
    if scheme != "nf4":
        return None
    if columns % BLOCK:
        return f"{columns} columns are no multiple of {BLOCK}"
    if device.type == "cpu" and rows % 32:
        return f"{rows} outputs are no multiple of 32"
    return None


def scheme_of_bits(bits: int | None, default: str) -> str:
    """The scheme that a number of bits means.

    Raises:
        OptionError: there is none.
    """
    if bits is None:
        return default
    if bits not in BITS:
        raise OptionError(f"{bits} bits are not possible.", "Give 4, 8 or 16.")
    return BITS[bits]


def _cpu_kernel() -> Any:
    """The fused CPU kernel's entry; None where this bitsandbytes is not the one it was read in."""
    if not version("bitsandbytes").startswith("0.50."):
        return None
    return getattr(bitsandbytes().cextension.lib, "gemv_4bit_inference_cpu_nf4_bf16", None)


def _bitsandbytes_operators() -> Any:
    """bitsandbytes' operators; its kernels register when it is imported."""
    bitsandbytes()
    return torch.ops.bitsandbytes
