"""Opens a target: the lean forward where its family has one, else transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash_local.errors import BackendUnavailable, OptionError

from .torch_cache import SlicedCache
from .torch_cache_device import DeviceCache
from .torch_embedding import embedding_bits
from .torch_families import lean_family
from .torch_hf import TransformersTarget
from .torch_hf_load import load_model
from .torch_kv_rows import KvMaker, PlainRows
from .torch_lean_load import PackedMaker, load_lean
from .torch_linear import LinearMaker, dense
from .torch_recurrent import RecurrentStates
from .torch_target import Target, TargetShape
from .torch_weights import TensorReader


def open_target(
    folder: Path,
    config: Any,
    shape: TargetShape,
    taps: tuple[int, ...],
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    body: LinearMaker = dense,
    head: LinearMaker = dense,
    rows: KvMaker = PlainRows,
    packed: PackedMaker | None = None,
    embed_bits: int | None = None,
    halved: bool = False,
    graphs: bool = False,
) -> Target:
    """The target in ``folder`` with caches for ``context`` positions.

    ``body`` and ``head`` store the products, ``packed`` those that the files hold in four bits,
    ``rows`` the K/V, ``embed_bits`` the rows of the embedding, which ``halved`` keeps in fp16.
    ``graphs`` asks for caches whose forwards can be captured; they cost more on the CPU.

    Raises:
        WeightsError: tensors are missing or damaged.
        OptionError: the family's forward cannot honour a choice.
        BackendUnavailable: packed weights of a family that has no forward of our own.
    """
    family = lean_family(config)
    if family is None:
        if packed is not None:
            raise BackendUnavailable(
                f"4-bit checkpoints of {config.model_type} models are not read.",
                "Choose the 16-bit repository, which is quantised while loading.",
            )
        if embed_bits == 8:
            raise OptionError(
                f"The embedding of {config.model_type} models stays in 16 bits.",
                "Leave --embed-bits out.",
            )
        hybrid = any(layer.kind == "linear_attention" for layer in shape.layers)
        states = RecurrentStates() if hybrid else None
        views = SlicedCache(
            shape.layers, context, dtype=dtype, device=device, recurrent=states, rows=rows
        )
        model = load_model(folder, config, dtype, device, body, head)
        return TransformersTarget(model, shape, taps, views, context)
    cache: SlicedCache | DeviceCache
    if graphs:
        cache = DeviceCache(shape.layers, context, dtype=dtype, device=device, rows=rows)
    else:
        cache = SlicedCache(shape.layers, context, dtype=dtype, device=device, rows=rows)
    quantised = packed is not None or body is not dense
    return load_lean(
        TensorReader(folder, dtype, device),
        config,
        family,
        shape,
        taps,
        cache,
        capacity=context,
        body=body,
        head=head,
        packed=packed,
        embed_bits=embedding_bits(embed_bits, device, quantised=quantised),
        halved=halved,
    )
