"""The finished draft: weights, config, and a card that says how it came about."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_local import __version__
from dflash_local.whole_file import write_whole

from .checkpoint import Progress
from .evaluate import Worth
from .files import write_tensors
from .network import DraftNetwork
from .recipe import STARTS, Recipe


def write_draft(
    folder: Path, network: DraftNetwork, raw: Mapping[str, Any], ids: torch.Tensor | None = None
) -> None:
    """Weights in bf16 under their published names, and config.json.

    ``ids`` are those of a reduced vocabulary; its head are the target's rows and not in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in network.named_parameters()
    }
    if ids is not None:
        kept = ids.to("cpu").sort().values
        tensors["d2t"] = kept - torch.arange(len(kept))
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_whole(folder / "config.json", json.dumps(raw, indent=1) + "\n")


def write_card(
    folder: Path,
    target: str,
    recipe: Recipe,
    progress: Progress,
    worth: Sequence[tuple[int, Worth]],
    sequences: int,
    answer_tokens: int,
    parameters: int,
    machine: str,
) -> None:
    """README.md beside the weights; ``worth`` are the evaluations, with the step of each."""
    fit, data = recipe.fit, recipe.data
    last = worth[-1][1]
    kinds = ", ".join(f"{kind} {tau:.2f}" for kind, tau in last.by_kind)
    rates = " ".join(f"{rate.rate:.2f}" for rate in last.positions)
    curve = "\n".join(
        f"| {step} | {loss:.3f} | {tau:.2f} |" for step, _, loss, tau in _thinned(progress.history)
    )
    tested = "\n".join(f"| {step} | {w.prompts} | {w.tau:.2f} |" for step, w in worth)
    sources = ["users' turns that the target wrote behind given openings"] * (
        recipe.prompts.own > 0
    )
    sources += ["those of a file"] * bool(recipe.prompts.file)
    trainings = f" in {1 + len(fit.others)} trainings" if fit.others else ""
    start = fit.init if fit.init in STARTS else "an earlier draft"
    version = "DFlash 2" if fit.v2 else "DFlash"
    selector = ", a candidate selector" * fit.selector
    text = f"""# {version} draft for {target}

{parameters / 1e6:.1f} M parameters: {fit.layers} layers, block {fit.block}, {data.taps} taps,
{fit.draft_vocab or "all"} ids to say{selector}.
Made by `dflash-local train` {__version__} on {machine}.

**Data.** {sequences} sequences with {answer_tokens} answer tokens{trainings}, written by the target
itself: greedy, but {data.sampled:.0%} of the answers at temperature {data.temperature:g}; at most
{data.answer_tokens} tokens each. Prompts: {" and ".join(sources)}.

**Fit.** {progress.step} steps of {fit.sequences} sequences, {progress.seconds / 60:.0f} minutes.
Start: {start}. Blocks of {fit.short_block} rows in the first {fit.short_share:.0%} of the
steps, then of {fit.block}. AdamW, rate {fit.rate:g}, warm-up {fit.warm_up:.0%}, cosine to 0.

**Held out.** {last.prompts} prompts that were never trained on, greedy, {last.max_tokens} tokens,
by speculative decoding in the engine: **tau {last.tau:.2f}** tokens per round, bonus included
({kinds}). Share of rounds in which slot 1, 2, ... was accepted: {rates}.

| step | prompts held out | tau |
|---|---|---|
{tested}

On the blocks trained on:

| step | loss | tau |
|---|---|---|
{curve}
"""
    write_whole(folder / "README.md", text.replace(" \n", "\n"))


def _thinned(
    history: Sequence[tuple[int, float, float, float]], rows: int = 12
) -> list[tuple[int, float, float, float]]:
    """At most ``rows`` lines of a curve, evenly, the last one among them."""
    if len(history) <= rows:
        return list(history)
    return [history[round(i * (len(history) - 1) / (rows - 1))] for i in range(rows)]
