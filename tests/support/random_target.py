"""Random targets of any family, saved by transformers as a published checkpoint is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}


def save_target(folder: Path, family: str, seed: int = 0, **settings: Any) -> Any:
    """Write a random target to ``folder`` and return it as transformers' own fp32 model."""
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **settings})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.2 * torch.randn_like(weight))
            elif weight.dim() > 1:
                # Larger than at the start of a training, so that answers do not end in a loop.
                weight.mul_(4.0)
            # As most are published; fp16 holds the products' weights as well, so that a CPU that
            # keeps them so decodes the same.
            weight.copy_(weight.bfloat16())
    model = model.eval()
    model.save_pretrained(folder)
    return model


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers' own ``generate`` answers, greedily."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
    )
    return [int(i) for i in out[0, len(prompt) :]]
