"""What a draft is worth: real speculative decoding of the held-out prompts, by the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_local.bench import positions, tau
from dflash_local.reply import Reply
from dflash_local.sampling import SamplingParams
from dflash_local.select import load
from dflash_local.stats import PositionRate
from dflash_local.whole_file import write_whole

from .prompts import Asked


@dataclass(frozen=True, slots=True)
class Worth:
    """Acceptance over the held-out prompts, greedy, in the draft's whole block.

    Of paths and without advice from the context: they show what the draft itself is worth, the
    engine gets more from the same draft.
    """

    prompts: int
    max_tokens: int
    tau: float
    """Tokens per round, bonus included, over all rounds."""
    by_kind: tuple[tuple[str, float], ...]
    positions: tuple[PositionRate, ...]


def evaluate(
    target: Path,
    draft: Path,
    prompts: Sequence[Asked],
    *,
    max_tokens: int,
    thinking: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Worth:
    """Answer every prompt with the draft in ``draft``."""
    sampling = SamplingParams(max_tokens=max_tokens, branching=False, lookup=False)
    replies: list[Reply] = []
    with load(target, draft=draft, backend="torch") as engine:
        block = engine.info.block_size
        for asked in prompts:
            progress(len(replies), len(prompts))
            replies.append(
                engine.complete(asked.text, sampling, block=block, thinking=thinking, reuse=False)
            )
    progress(len(prompts), len(prompts))
    kinds = sorted({asked.kind for asked in prompts})
    by_kind = [
        (kind, tau([r for r, asked in zip(replies, prompts, strict=True) if asked.kind == kind]))
        for kind in kinds
    ]
    return Worth(len(prompts), max_tokens, tau(replies), tuple(by_kind), positions(replies))


def write_worth(path: Path, worth: Sequence[tuple[int, Worth]]) -> None:
    """Evaluations and the steps they were made at, one per line."""
    lines = [json.dumps({"step": step, **asdict(found)}) for step, found in worth]
    write_whole(path, "\n".join(lines) + "\n")


def read_worth(path: Path) -> list[tuple[int, Worth]]:
    """What ``write_worth`` wrote; nothing where there is no file."""
    if not path.is_file():
        return []
    found = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            value = json.loads(line)
            step = value.pop("step")
            value["by_kind"] = tuple((kind, tau) for kind, tau in value["by_kind"])
            value["positions"] = tuple(PositionRate(**rate) for rate in value["positions"])
            found.append((step, Worth(**value)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # damaged: figures of the past, which nothing depends on
    return found
