"""A random pair in the shapes of a published one, for benches without a download."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from dflash_local.backend import BackendInfo
from dflash_local.draft_config import DraftConfig
from dflash_local.rope import RopeConfig
from dflash_local.weights import draft_shapes

from .torch_backend import TorchBackend
from .torch_cache_device import DeviceCache
from .torch_draft import TorchDraft
from .torch_draft_context_device import DeviceContext
from .torch_embedding import Int8Embedding
from .torch_graphs import Graphs
from .torch_lean import LeanLayer, LeanTarget, LeanWeights
from .torch_quant import Quantiser
from .torch_rope import RopeTable
from .torch_target import LayerShape, TargetShape

BLOCK = 16
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of a target and its draft."""

    layers: int
    hidden: int
    middle: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_layers: int = 5
    """Also the number of tapped layers."""

    @property
    def quantised(self) -> int:
        """Weights of the target's body and head."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        body = self.layers * self.hidden * (heads + 3 * self.middle)
        return body + self.vocab * self.hidden

    @property
    def draft(self) -> DraftConfig:
        """The draft's numbers."""
        step = (self.layers - 3) // max(1, self.draft_layers - 1)
        return DraftConfig(
            hidden_size=self.hidden,
            layers=self.draft_layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.middle,
            vocab_size=self.vocab,
            rms_norm_eps=1e-6,
            attention_bias=False,
            rope=RopeConfig(theta=1e6),
            block_size=BLOCK,
            mask_token_id=self.vocab - 1,
            target_layer_ids=tuple(1 + step * i for i in range(self.draft_layers)),
            layer_kinds=tuple("full" for _ in range(self.draft_layers)),
            sliding_window=None,
            causal=(False,) * self.draft_layers,
            target_hidden_size=self.hidden,
        )


SIZES = {
    "8b": Size(36, 4096, 12288, 32, 8, 128, 151_936),
    "4b": Size(36, 2560, 9728, 32, 8, 128, 151_936),
    "tiny": Size(4, 256, 512, 8, 2, 32, 2048, draft_layers=2),
}


class RandomTensors(Mapping[str, torch.Tensor]):
    """Tensors of a draft that are made when they are asked for, one at a time."""

    def __init__(self, config: DraftConfig, device: torch.device) -> None:
        self._shapes = draft_shapes(config)
        self._device = device

    def __getitem__(self, name: str, /) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=_DTYPE, device=self._device)
        weight = torch.empty(shape, dtype=_DTYPE, device=self._device)
        return weight.normal_(0.0, shape[-1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def random_draft(
    size: Size, target: LeanTarget, quantiser: Quantiser, scheme: str, context: int
) -> TorchDraft:
    """A draft bound to a random target."""
    return TorchDraft(
        size.draft,
        RandomTensors(size.draft, target.device),
        target.embed,
        target.logits,
        context,
        quantiser.maker(scheme),
        DeviceContext,
    )


def random_backend(
    size: Size, target: LeanTarget, draft: TorchDraft, scheme: str, context: int, graphs: Graphs
) -> TorchBackend:
    """Both behind the seam."""
    info = BackendInfo(
        backend="torch",
        target="random",
        draft="random",
        device=str(target.device),
        dtype="bf16",
        quantization=scheme,
        vocab_size=size.vocab,
        block_size=BLOCK,
        context=context,
        stop_ids=(),
        branching=target.cache.branching,
    )
    return TorchBackend(info, target, draft, graphs)


def random_target(
    size: Size, quantiser: Quantiser, scheme: str, context: int, device: torch.device
) -> tuple[LeanTarget, DeviceCache]:
    """A random target, never more than one product of it in 16 bits."""
    make = quantiser.maker(scheme)
    generator = torch.Generator(device).manual_seed(0)

    def random(outputs: int, columns: int) -> torch.Tensor:
        weight = torch.empty(outputs, columns, dtype=_DTYPE, device=device)
        return weight.normal_(0.0, columns**-0.5, generator=generator)

    ones = torch.ones(size.hidden, dtype=_DTYPE, device=device)
    head_ones = torch.ones(size.head_dim, dtype=_DTYPE, device=device)
    wide, narrow = size.heads * size.head_dim, size.kv_heads * size.head_dim
    layers = [
        LeanLayer(
            input_norm=ones,
            qkv=make(f"layers.{i}.qkv", random(wide + 2 * narrow, size.hidden)),
            q_norm=head_ones,
            k_norm=head_ones,
            out=make(f"layers.{i}.out", random(size.hidden, wide)),
            post_norm=ones,
            gate_up=make(f"layers.{i}.gate_up", random(2 * size.middle, size.hidden)),
            down=make(f"layers.{i}.down", random(size.hidden, size.middle)),
        )
        for i in range(size.layers)
    ]
    embedding = Int8Embedding(random(size.vocab, size.hidden))
    head = make("head", random(size.vocab, size.hidden))
    weights = LeanWeights(embedding, layers, ones, head, tied=False, eps=1e-6)
    numbers = LayerShape("full_attention", None, size.heads, size.kv_heads, size.head_dim)
    shape = TargetShape(size.hidden, (numbers,) * size.layers, size.vocab, size.vocab)
    cache = DeviceCache(shape.layers, context, dtype=_DTYPE, device=device)
    exponents = torch.arange(0, size.head_dim, 2, dtype=torch.float) / size.head_dim
    rope = RopeTable(1e6**-exponents, 1.0, context, dtype=_DTYPE, device=device)
    return LeanTarget(weights, shape, size.draft.target_layer_ids, cache, rope), cache
