"""Products with a weight, however it is stored."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from dflash_local.free_memory import is_x86
from dflash_local.weight_bytes import HALF_BLOCK, in_blocks

_PACKED_FOR = 8
"""Rows that the packed order is chosen for; it serves other numbers as well."""

_AT_ONCE = 2048
"""Rows of a weight that are rounded together."""


class Linear(Protocol):
    """``x @ weight.T + bias`` for states ``[rows, columns]``."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product, ``[rows, outputs]``."""
        ...

    @property
    def bytes(self) -> int:
        """Size of the weight, its scales and its bias."""
        ...


class LinearMaker(Protocol):
    """Turns a weight into a product; decides how it is stored."""

    def __call__(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """``weight`` is ``[outputs, columns]``; ``name`` is for reports."""
        ...


class DenseLinear:
    """A weight as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product."""
        return F.linear(states, self.weight, self.bias)

    @property
    def bytes(self) -> int:
        """Size of weight and bias."""
        return tensor_bytes(self.weight, self.bias)


class PackedLinear:
    """A weight in the order in which the CPU's matrix kernels read it.

    A product of few rows is bound by reading the weight, and the stock layout reads it at less
    than half speed. Stock against packed: 3.4 against 1.4 ms for 1 row of a 49,152 x 576 head in
    bf16 with AVX512-BF16, 4.1 against 2.4 for 8; in fp32 with AVX2 on two threads, all products of
    the demo target, 77 against 54 ms and 160 against 72.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._shape = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
        self._bias = bias

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            states, self._packed, self._bias, "none", [], ""
        )
        return product

    @property
    def bytes(self) -> int:
        """Size of weight and bias."""
        return int(self._packed.element_size() * self._shape.numel()) + tensor_bytes(self._bias)


class TallLinear(DenseLinear):
    """An fp32 weight of which one thread multiplies a few rows: the weight goes first.

    The library's blocking suits a tall first factor: all products of the demo target take 120
    instead of 166 ms for 5 rows (AVX2). One row is quickest as it is, quicker than packed.
    """

    _FEW = 8
    """Up to so many rows it pays."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product."""
        if not 1 < states.shape[0] <= self._FEW:
            return super().__call__(states)
        product = (self.weight @ states.t()).t().contiguous()
        return product if self.bias is None else product + self.bias


class HalfLinear:
    """A weight in fp16 under states of fp32 or bf16; sums are in fp32.

    On a CPU without bf16 units such a product reads half the bytes of fp32, and its kernels take
    up to six rows in about the time of one: a 49,152 x 576 head for 1, 5 and 8 rows in 5.9, 7.8
    and 14.8 ms, where fp32 takes 15, 17 and 29 and stock bf16, row by row, 9, 31 and 58 (AVX2).
    A bf16 weight is kept exactly but for what lies below 2**-17, which moves by 2**-25 at most.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        # The kernels' blocks are 16 outputs wide, and the last ones are as large as the others.
        outputs, columns = (
            -(-n // step) * step for n, step in zip(weight.shape, (16, HALF_BLOCK), strict=True)
        )
        self._size = 2 * outputs * columns + tensor_bytes(bias)
        added = None if bias is None else bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), added)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product."""
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(
            states.float(), self._packed
        )
        return product.to(states.dtype)

    @property
    def bytes(self) -> int:
        """Size of weight and bias."""
        return self._size


class ByteLinear:
    """A weight in 8 bits, a scale per output, under states that are rounded to 8 bits as they come.

    For drafts, whose rounding costs a little acceptance and never an id of the answer. The states'
    scale is one for all rows, so an input with a few huge numbers, as a target's raw states have,
    is not for it. States that are no numbers give no good product, but stop nothing.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        rows, columns = weight.shape
        rounded = torch.empty((rows, columns), dtype=torch.int8)
        scales = torch.empty(rows, dtype=torch.double)
        # Some rows at a time: in fp32 all of a large head would be several times its own size.
        for place in (slice(start, start + _AT_ONCE) for start in range(0, rows, _AT_ONCE)):
            part = weight[place].float()
            least, most = part.aminmax(dim=1)
            scales[place] = torch.maximum(-least, most).clamp_(min=1e-12).double() / 127.0
            steps = (part / scales[place, None].float()).round_().clamp_(-127, 127)
            rounded[place] = steps.to(torch.int8)
        zeros = torch.zeros(rows, dtype=torch.long)
        with warnings.catch_warnings():
            # The library means to give these tensors up; `has_byte_products` asks for them.
            warnings.simplefilter("ignore")
            quantised = torch._make_per_channel_quantized_tensor(rounded, scales, zeros, 0)
        added = None if bias is None else bias.float()
        self._packed = torch.ops.quantized.linear_prepack(quantised, added)
        self._size = in_blocks((rows, columns)) + 8 * rows + tensor_bytes(added)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The product."""
        # Sums of two products would leave 16 bits where the CPU has no instruction for all four;
        # states in 7 bits do not.
        product: torch.Tensor
        try:
            product = torch.ops.quantized.linear_dynamic(
                states.float(), self._packed, reduce_range=True
            )
        except RuntimeError:  # how the library refuses them; asked first, every product would pay
            numbers = states.float().nan_to_num(0.0, 0.0, 0.0)
            product = torch.ops.quantized.linear_dynamic(numbers, self._packed, reduce_range=True)
        return product.to(states.dtype)

    @property
    def bytes(self) -> int:
        """Size of weight, scales and bias."""
        return self._size


@cache
def has_half_products() -> bool:
    """Whether this CPU and this build of torch multiply fp32 states with fp16 weights quickly."""
    return (
        is_x86()
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and torch.backends.quantized.engine in ("x86", "fbgemm")
        and hasattr(torch.ops.quantized, "linear_dynamic_fp16")
    )


def has_byte_products() -> bool:
    """Whether it also multiplies weights of 8 bits with states that are rounded on the way."""
    operators = (
        (torch.ops.quantized, "linear_dynamic"),
        (torch, "_make_per_channel_quantized_tensor"),
    )
    return has_half_products() and all(hasattr(place, name) for place, name in operators)


def fits_half(weight: torch.Tensor) -> bool:
    """Whether fp16 can hold every number; infinities and what is no number do not fit."""
    return _largest(weight) <= torch.finfo(torch.float16).max


def _largest(weight: torch.Tensor) -> float:
    """The largest magnitude; no number where one is none."""
    least, most = weight.detach().aminmax()
    return float(torch.maximum(-least, most))


def half(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The maker that keeps weights of a CPU in fp16; what fp16 cannot hold stays as it is."""
    return HalfLinear(weight, bias) if fits_half(weight) else dense(name, weight, bias)


def light(rest: LinearMaker) -> LinearMaker:
    """The maker for drafts on a CPU: 8 bits, but for the projection of the target's raw states, and
    for a damaged weight, which no scale holds."""

    def make(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        if name == "draft.fc" or not math.isfinite(_largest(weight)):
            return rest(name, weight, bias)
        return ByteLinear(weight, bias)

    return make


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this weight is one for the CPU's packed kernels, and they are there."""
    if weight.device.type != "cpu" or not is_x86():
        return False
    needed = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and torch.get_num_threads() > 1


def dense(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The maker that keeps the numbers as they are, in the way that is multiplied fastest."""
    if can_pack(weight):
        return PackedLinear(weight, bias)
    if weight.device.type == "cpu" and is_x86():
        if weight.dtype == torch.float32:
            return TallLinear(weight, bias)
        if weight.dtype == torch.bfloat16 and has_half_products() and fits_half(weight):
            return HalfLinear(weight, bias)
    return DenseLinear(weight, bias)


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Size of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
