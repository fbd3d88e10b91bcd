"""Which kernel bitsandbytes picks for 4-bit products on a card, from the installed rule itself.

The rule is a pure function of card, shape and rows, but its module loads the CUDA library, so it
is read from the source and evaluated alone: the table needs no card.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dflash_local.errors import BackendUnavailable, OptionError, how_to_install

_RULE = "_gemm_4bit_use_custom_cuda"
_FLOOR = "_GEMM_4BIT_CUSTOM_FLOOR_M"


@dataclass(frozen=True, slots=True)
class Card:
    """What the rule asks of a card."""

    name: str
    multiprocessors: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Product:
    """Products of one shape in a target."""

    name: str
    columns: int
    outputs: int
    count: int


@dataclass(frozen=True, slots=True)
class KernelRow:
    """How much of a target's quantised weight takes the slow path on a card."""

    target: str
    card: str
    rows: int
    slow_share: float
    """Share of the weight that is expanded to 16 bits before the product."""
    slow: tuple[str, ...]
    """The products that are."""


CARDS = (
    Card("3060", 28, (8, 6)),
    Card("3090", 82, (8, 6)),
    Card("4060 Ti", 34, (8, 9)),
    Card("4070 Ti S", 66, (8, 9)),
    Card("4090", 128, (8, 9)),
    Card("5070", 48, (12, 0)),
    Card("5080", 84, (12, 0)),
    Card("5090", 170, (12, 0)),
)

TARGETS: dict[str, tuple[Product, ...]] = {
    "4b": (
        Product("qkv", 2560, 6144, 36),
        Product("out", 4096, 2560, 36),
        Product("gate_up", 2560, 19456, 36),
        Product("down", 9728, 2560, 36),
    ),
    "8b": (
        Product("qkv", 4096, 6144, 36),
        Product("out", 4096, 4096, 36),
        Product("gate_up", 4096, 24576, 36),
        Product("down", 12288, 4096, 36),
    ),
    "27b": (
        Product("delta qkvz", 5120, 16384, 48),
        Product("delta out", 6144, 5120, 48),
        Product("qkv", 5120, 14336, 16),
        Product("out", 6144, 5120, 16),
        Product("gate_up", 5120, 34816, 64),
        Product("down", 17408, 5120, 64),
    ),
}
"""Merged products of the Qwen3 4B and 8B targets and of the 27B hybrid."""


def replay(
    targets: Sequence[str] = ("8b", "27b"), rows: Sequence[int] = (1, 4, 8, 16)
) -> list[KernelRow]:
    """One row per target, card and number of rows.

    Raises:
        OptionError: a target is not known.
        BackendUnavailable: bitsandbytes is missing, or its rule is not where it was.
    """
    unknown = [name for name in targets if name not in TARGETS]
    if unknown:
        raise OptionError(
            f"There are no shapes for {unknown[0]!r}.", f"Give some of {', '.join(TARGETS)}."
        )
    return [_row(target, card, count) for target in targets for card in CARDS for count in rows]


def as_table(rows: Sequence[KernelRow]) -> str:
    """Markdown, one line per target and card."""
    counts = sorted({row.rows for row in rows})
    lines = ["| target | card | " + " | ".join(f"M = {c}" for c in counts) + " | slow |"]
    lines.append("|---" * (len(counts) + 3) + "|")
    for target, card in dict.fromkeys((row.target, row.card) for row in rows):
        own = {row.rows: row for row in rows if (row.target, row.card) == (target, card)}
        shares = " | ".join(f"{own[c].slow_share:.0%}" for c in counts)
        slow = ", ".join(own[counts[-1]].slow) or "-"
        lines.append(f"| {target} | {card} | {shares} | {slow} |")
    return "\n".join(lines)


def _row(target: str, card: Card, rows: int) -> KernelRow:
    rule = _rule(card)
    products = TARGETS[target]
    slow = [p for p in products if not rule(0, torch.bfloat16, rows, p.outputs, p.columns)]
    total = sum(p.columns * p.outputs * p.count for p in products)
    share = sum(p.columns * p.outputs * p.count for p in slow) / total
    return KernelRow(target, card.name, rows, share, tuple(p.name for p in slow))


def _rule(card: Card) -> Callable[[int, torch.dtype, int, int, int], bool]:
    """The rule as if ``card`` were in the machine."""
    spec = find_spec("bitsandbytes")
    if spec is None or not spec.submodule_search_locations:
        raise BackendUnavailable("bitsandbytes is not installed here.", how_to_install("cuda"))
    source = Path(spec.submodule_search_locations[0]) / "backends" / "cuda" / "ops.py"
    kept: list[ast.stmt] = []
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == _RULE:
            node.decorator_list = []
            kept.append(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _FLOOR:
            kept.append(node)
    if len(kept) != 2:
        raise BackendUnavailable(
            "This bitsandbytes keeps its 4-bit rule elsewhere.", "Install 0.50.x."
        )
    names: dict[str, Any] = {
        "torch": torch,
        "_gpu_dispatch_props": lambda index: (card.multiprocessors, *card.capability),
    }
    exec(compile(ast.Module(kept, []), str(source), "exec"), names)
    rule: Callable[[int, torch.dtype, int, int, int], bool] = names[_RULE]
    return rule
