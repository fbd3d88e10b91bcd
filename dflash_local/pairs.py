"""What an entry of models.toml says, as values, and the checks that turn TOML into them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from dflash_local.toml_table import TomlTable

SCHEMA = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")

BACKENDS = ("mlx", "torch", "any")
KINDS = ("dflash", "dflash2")
SOURCES = ("hub", "demo", "package", "folder")
THINKING = ("none", "off", "on", "any", "unknown")
WEIGHTS = ("bf16", "fp8", "8bit", "4bit", "nf4", "awq-int4", "mxfp4", "q4_1")
ON_LOAD = ("nf4", "int8")


@dataclass(frozen=True, slots=True)
class Files:
    """One repository of weights: a target in one quantisation, or a draft."""

    repo: str
    """Repo id on the hub, or the path of a folder; for other sources a label."""
    source: str = "hub"
    """``hub``, ``demo`` (made by demo.py), ``package`` (comes with this one) or ``folder``."""
    revision: str = ""
    """Commit to fetch; empty where none is pinned, then pull resolves and records one."""
    approx_bytes: int = 0
    """Download size as published, 0 where not known; pull asks the hub for the exact one."""
    licence: str = ""
    """SPDX name or the licence's own; empty where it was not seen."""
    gated: bool = False
    """Whether terms must be accepted on the hub before a download."""
    weights: str = "bf16"
    """How the weights are stored; one of ``WEIGHTS``."""
    backend: str = "any"
    """Which backend loads these files; one of ``BACKENDS``."""
    on_load: tuple[str, ...] = ()
    """Quantisations that the backend may apply while loading; from ``ON_LOAD``."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The target's sizes that memory depends on; 0 where one is not known or there is none."""

    hidden: int
    kv_layers: int
    """Layers whose K/V grows with the context (all but recurrent and sliding ones)."""
    kv_heads: int
    head_dim: int
    heads: int = 0
    """Query heads."""
    inner: int = 0
    """Numbers per row in the middle of the feed-forward part."""
    vocab: int = 0
    window: int = 0
    """Rows that a sliding layer sees."""
    window_layers: int = 0
    window_kv_heads: int = 0
    window_head_dim: int = 0
    recurrent_bytes: int = 0
    """The states of all recurrent layers, whatever the context."""
    parameters: int = 0
    """Weights in all; with it, forms whose size was not published can be judged as well."""


SHAPE_KEYS = tuple(field.name for field in fields(Shape))


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and the draft that was trained for it."""

    name: str
    title: str
    kind: str
    """Draft generation, one of ``KINDS``."""
    base: str
    """Repo id of the original model that all targets are forms of."""
    block: int
    """Tokens per draft block as trained, the pending one included."""
    context: int
    """Longest context of the target, tokens; 0 where only the target's config.json says it."""
    thinking: str
    """Chat mode the draft was trained for: thinking ``on``, ``off`` or ``any``; ``none`` where the
    model cannot think, ``unknown`` where it was not published."""
    verified: bool
    """Whether this pair ran through bench with identical ids."""
    targets: tuple[Files, ...]
    draft: Files
    shape: Shape | None = None
    notes: tuple[str, ...] = ()

    def targets_for(self, backend: str) -> tuple[Files, ...]:
        """The targets that ``backend`` loads, best choice first; an empty name means all."""
        return tuple(t for t in self.targets if not backend or t.backend in (backend, "any"))


def parse_pairs(document: Mapping[str, object], file: str, text: str) -> dict[str, Pair]:
    """All entries of one parsed models.toml.

    Args:
        document: what the TOML parser returned.
        file: its name, for messages.
        text: its text, to find line numbers in.

    Raises:
        RegistryError: an unknown or missing key, a wrong type, a value out of range.
    """
    top = TomlTable(document, (), file, text)
    if top.whole("schema", low=1) != SCHEMA:
        raise top.error("schema", f"must be {SCHEMA} for this version of dflash-local")
    top.texts("folders")  # read by places.py
    pairs = {name: _pair(name, table) for name, table in top.tables("pair")}
    top.finish()
    return pairs


def _pair(name: str, table: TomlTable) -> Pair:
    """One ``[pair.NAME]``."""
    if not _NAME.fullmatch(name):
        raise table.error(
            "", "is no usable name: lower-case letters, digits, dot, dash, underscore"
        )
    targets = tuple(_files(entry, target=True) for entry in table.list_of_tables("target"))
    shape = table.optional_table("shape")
    pair = Pair(
        name=name,
        title=table.text("title"),
        kind=table.text("kind", choices=KINDS),
        base=table.text("base"),
        block=table.whole("block", low=1),
        context=table.whole("context", 0, low=1),
        thinking=table.text("thinking", choices=THINKING),
        verified=table.flag("verified"),
        targets=targets,
        draft=_files(table.table("draft"), target=False),
        shape=None if shape is None else _shape(shape),
        notes=table.texts("notes"),
    )
    table.finish()
    return pair


def _files(table: TomlTable, *, target: bool) -> Files:
    """A ``[[pair.NAME.target]]`` or the ``[pair.NAME.draft]``."""
    files = Files(
        repo=table.text("repo"),
        source=table.text("source", "hub", choices=SOURCES),
        revision=table.text("revision", ""),
        approx_bytes=table.whole("approx_bytes", 0, low=0),
        licence=table.text("licence", ""),
        gated=table.flag("gated", default=False),
        weights=table.text("weights", None if target else "bf16", choices=WEIGHTS),
        backend=table.text("backend", choices=BACKENDS) if target else "any",
        on_load=table.texts("on_load", choices=ON_LOAD) if target else (),
    )
    table.finish()
    return files


def _shape(table: TomlTable) -> Shape:
    """A ``[pair.NAME.shape]``."""
    required = ("hidden", "kv_heads", "head_dim")
    values = {name: table.whole(name, low=1) for name in required}
    values["kv_layers"] = table.whole("kv_layers", low=0)
    values |= {name: table.whole(name, 0, low=0) for name in SHAPE_KEYS if name not in values}
    table.finish()
    return Shape(**values)
