"""4-bit and 8-bit blocks of a GGUF file as MLX's own packed weights, value for value.

A Q4_1 block is a scale, an offset and 32 numbers of 4 bits: just what MLX calls affine
quantisation with groups of 32. A Q8_0 block is a scale and 32 signed bytes: the same with 8 bits,
the offset being -128 scales. So nothing is rounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from dflash_local.errors import WeightsError
from dflash_local.gguf_llama import heads_to_unpermute, tensor_name, unpermute

GROUP = 32
_BITS = {"Q4_1": 4, "Q8_0": 8}

Packed = tuple[mx.array, mx.array, mx.array]
"""Weight, scales, offsets."""


def pack(model: Any, source: Path, dtype: mx.Dtype) -> None:
    """Put the blocks of ``source`` in the place of the model's linear and embedding weights.

    Scales are kept in ``dtype``; fp16 and fp32 hold them exactly.
    """
    from gguf import GGUFReader

    modules = dict(model.named_modules())
    fresh: list[tuple[str, Any]] = []
    for tensor in GGUFReader(source).tensors:
        bits = _BITS.get(tensor.tensor_type.name)
        if bits is None:
            continue
        name = tensor_name(tensor.name).removesuffix(".weight")
        module = modules.get(name)
        rows = np.asarray(tensor.data)
        args = model.args
        heads = heads_to_unpermute(tensor.name, args.num_attention_heads, args.num_key_value_heads)
        if heads:
            rows = unpermute(rows, heads)
        weight, scales, offsets = unpack_blocks(rows, bits)
        if module is None or module.weight.shape != (scales.shape[0], scales.shape[1] * GROUP):
            raise WeightsError(f"{source} does not belong to this model ({tensor.name}).")
        fresh.append((name, _quantized(module, bits, weight, scales, offsets, dtype)))
    model.update_modules(tree_unflatten(fresh))


def unpack_blocks(rows: NDArray[np.uint8], bits: int) -> Packed:
    """Raw blocks ``[outputs, bytes]`` in MLX's layout, scales in fp16."""
    size = 20 if bits == 4 else 34
    blocks = rows.reshape(rows.shape[0], -1, size)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0]
    if bits == 4:
        offsets = blocks[..., 2:4].copy().view(np.float16)[..., 0]
        # The low halves of the bytes are values 0..15 of a block, the high halves 16..31.
        values = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
        codes = values[..., 0::2] | (values[..., 1::2] << 4)
    else:
        offsets = scales * np.float16(-128)
        codes = blocks[..., 2:] ^ 128
    words = np.ascontiguousarray(codes.reshape(rows.shape[0], -1)).view("<u4")
    return mx.array(words), mx.array(scales), mx.array(offsets)


def _quantized(
    module: Any, bits: int, weight: mx.array, scales: mx.array, offsets: mx.array, dtype: mx.Dtype
) -> Any:
    """The quantised twin of a linear layer or an embedding."""
    outputs, inputs = module.weight.shape
    twin: Any
    if isinstance(module, nn.Embedding):
        twin = nn.QuantizedEmbedding(outputs, inputs, group_size=GROUP, bits=bits)
    else:
        twin = nn.QuantizedLinear(
            inputs, outputs, bias="bias" in module, group_size=GROUP, bits=bits
        )
        if "bias" in module:
            twin.bias = module.bias
    twin.weight = weight
    twin.scales, twin.biases = scales.astype(dtype), offsets.astype(dtype)
    return twin
