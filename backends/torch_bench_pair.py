"""One pair in fp32, bf16 and NF4, side by side: plain and speculative, in one process."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from dflash_local.engine import Engine
from dflash_local.sampling import SamplingParams
from dflash_local.select import load

PROMPTS = (
    "Explain in simple words why the sky is blue.",
    "Write a Python function that returns the largest of three numbers.",
    "Name three rivers of Europe and one city on each of them.",
    "What should one pack for a week of hiking in autumn?",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take?",
)
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp32", {"dtype": "fp32", "quantize": "none"}),
    ("bf16", {"dtype": "bf16", "quantize": "none"}),
    ("NF4 body, head and draft", {"dtype": "bf16", "quantize": "nf4"}),
)
_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One way of storing the weights; rates are medians over the prompts."""

    weights: str
    plain: float
    """Tokens per second."""
    speculative: float
    tau: float
    target_bytes: int
    draft_bytes: int
    kernels: tuple[str, ...]


def table(pair: str, prompts: int, max_tokens: int) -> str:
    """Markdown with a row per way of storing the weights.

    Raises:
        DflashError: the pair is unknown, not here, or cannot be loaded.
    """
    rows = [measured(pair, *setting, prompts, max_tokens) for setting in SETTINGS]
    lines = [
        f"{pair} · torch {torch.__version__} · {torch.get_num_threads()} threads · {prompts} "
        f"prompts of {max_tokens} tokens · greedy, width by what pays",
        "",
        "| weights | plain tok/s | speculative tok/s | ratio | tau | target MB | draft MB |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row.weights} | {row.plain:.1f} | {row.speculative:.1f} | "
            f"{row.speculative / row.plain:.2f} | {row.tau:.2f} | {row.target_bytes / 1e6:.0f} | "
            f"{row.draft_bytes / 1e6:.0f} |"
            for row in rows
        ),
        "",
        *(f"- {row.weights}: {'; '.join(row.kernels)}" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def measured(pair: str, weights: str, how: dict[str, Any], prompts: int, max_tokens: int) -> Row:
    """Load the pair one way and answer every prompt plainly and with the draft, in turn."""
    with load(pair, backend="torch", context=_CONTEXT, **how) as engine:
        settings = SamplingParams(max_tokens=max_tokens)
        engine.complete(PROMPTS[0], SamplingParams(max_tokens=8), reuse=False)
        pairs = [_both(engine, PROMPTS[i % len(PROMPTS)], settings) for i in range(prompts)]
        memory = engine.memory()
        return Row(
            weights=weights,
            plain=median(plain for plain, _, _ in pairs),
            speculative=median(speculative for _, speculative, _ in pairs),
            tau=sum(tau for _, _, tau in pairs) / len(pairs),
            target_bytes=memory.weights,
            draft_bytes=memory.draft,
            kernels=engine.info.kernels,
        )


def _both(engine: Engine, prompt: str, settings: SamplingParams) -> tuple[float, float, float]:
    plain = engine.complete(prompt, settings, block=0, reuse=False)
    drafted = engine.complete(prompt, settings, reuse=False)
    return plain.stats.tok_s, drafted.stats.tok_s, drafted.stats.tau
