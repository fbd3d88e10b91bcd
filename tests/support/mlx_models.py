"""Tiny random targets of every architecture that the MLX backend runs, and a draft to script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes

from dflash_local.backends.mlx_advice import Asked
from dflash_local.backends.mlx_choice import Chooser
from dflash_local.backends.mlx_draft import Adjust
from dflash_local.backends.mlx_probs import Drafted
from dflash_local.draft_config import parse_draft_config
from dflash_local.weights import draft_shapes

VOCAB = 128
WINDOW = 12

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama"},
    "llama_sliding": {
        **_BASE,
        "model_type": "llama",
        "layer_types": _ALTERNATING,
        "sliding_window": WINDOW,
    },
    "mistral": {**_BASE, "model_type": "mistral", "sliding_window": WINDOW},
    "qwen2": {**_BASE, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_BASE, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_sliding": {
        **_BASE,
        "model_type": "qwen3",
        "layer_types": _ALTERNATING,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    },
    "qwen3_moe": {**_BASE, **_MOE, "model_type": "qwen3_moe", "mlp_only_layers": []},
    "qwen3_next": {
        **_BASE,
        **_DELTA,
        **_MOE,
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **_BASE,
            **_DELTA,
            "model_type": "qwen3_5_text",
            "rope_parameters": _ROPE,
        },
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **_BASE,
            **_DELTA,
            **_MOE,
            "model_type": "qwen3_5_moe_text",
            "rope_parameters": _ROPE,
            "shared_expert_intermediate_size": 24,
        },
    },
    "gemma3": {
        **_BASE,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "gemma3_multimodal": {
        "model_type": "gemma3",
        "vocab_size": VOCAB,
        "text_config": {
            **_BASE,
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
    },
    "gemma4": {
        **_BASE,
        "model_type": "gemma4_text",
        "global_head_dim": 16,
        "layer_types": _ALTERNATING,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4_shared": {
        **_BASE,
        "model_type": "gemma4_text",
        "global_head_dim": 16,
        "layer_types": _ALTERNATING,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **_BASE,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": _ALTERNATING,
        "sliding_window": WINDOW,
    },
}
"""By name; the window is far smaller than what the tests feed."""

OTHERS: dict[str, dict[str, Any]] = {
    "mamba2": {
        **_BASE,
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 16,
        "intermediate_size": 64,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_rank": 2,
        "time_step_limit": [0.0, 1e9],
    },
    "olmo2": {**_BASE, "model_type": "olmo2"},
}
"""Architectures that are only decoded plainly."""


def random_target(folder: Path, name: str, seed: int = 0) -> Path:
    """A folder with config and random fp32 weights that give varied greedy answers."""
    config = {**CONFIGS, **OTHERS}[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = random_model(config, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def random_model(config: Mapping[str, Any], seed: int = 0) -> Any:
    """The library's model with weights drawn anew."""
    make, arguments = _get_classes(dict(config))
    model = make(arguments.from_dict(json.loads(json.dumps(config))))
    mx.random.seed(seed)

    def draw(name: str, weight: mx.array) -> mx.array:
        noise: mx.array = mx.random.normal(weight.shape)
        if weight.ndim == 1:
            return mx.add(weight, 0.1 * noise)
        # A strong embedding that is also the head would answer with the last id for ever.
        gain: float = 0.2 if "embed_tokens.weight" in name else 1.5
        return mx.multiply(noise, gain * float(weight.shape[-1]) ** -0.5)

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())
    return model


class ScriptedDraft:
    """Proposes what a recorded answer says, right for as many ids as told, then wrong.

    Args:
        known: prompt and answer; the ids at every position.
        pattern: how many ids are right, proposal by proposal, in turn.
        width: features per row that it expects.
    """

    bytes = 0

    def __init__(self, known: Sequence[int], pattern: Sequence[int], width: int) -> None:
        self.known = list(known)
        self.length = 0
        self._pattern = pattern
        self._width = width
        self._calls = 0

    def append(self, features: mx.array) -> None:
        """Count the rows."""
        assert features.shape[1] == self._width
        self.length += features.shape[0]

    def propose(self, asked: Asked, count: int, chooser: Chooser, adjust: Adjust) -> Drafted:
        """Ids after position ``length``, where the anchor stands."""
        right = self._pattern[self._calls % len(self._pattern)]
        self._calls += 1
        ids = self.known[self.length + 1 : self.length + 1 + count]
        ids += [0] * (count - len(ids))
        ids = [i if k < right else (i + 1) % VOCAB for k, i in enumerate(ids)]
        return Drafted(mx.array(ids, dtype=mx.int32))

    def crop(self, length: int) -> None:
        """Forget rows."""
        self.length = min(self.length, length)

    def reset(self) -> None:
        """Forget all."""
        self.length = 0

    def cache_arrays(self) -> list[mx.array]:
        """Nothing on the device."""
        return []


def random_draft(
    folder: Path, taps: Sequence[int], hidden: int = 32, seed: int = 1, **override: Any
) -> Path:
    """A folder with a random draft for a random target."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "block_size": 4,
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": list(taps)},
        **override,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(seed)
    tensors = {
        name: mx.random.normal(shape) * shape[-1] ** -0.5 if len(shape) > 1 else mx.ones(shape)
        for name, shape in draft_shapes(parse_draft_config(config)).items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder
