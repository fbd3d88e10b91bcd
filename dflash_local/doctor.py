"""Looks at this machine and says what is there, what is wrong and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dflash_local import __version__, demo, free_memory, paths, registry, storage
from dflash_local.cli_list import state
from dflash_local.costs import Costs, costs_folder
from dflash_local.errors import DflashError
from dflash_local.events import Round
from dflash_local.fit import gigabytes
from dflash_local.hub import offline, shown_endpoint
from dflash_local.select import backend_name
from dflash_local.width import AutoWidth

PACKAGES = (
    *("torch", "mlx", "mlx-lm", "transformers", "tokenizers", "safetensors", "bitsandbytes"),
    *("huggingface_hub", "llvmlite", "textual", "numpy"),
)
_LOW_DISK = 5 * 10**9
_TEST_SECONDS = 10.0
_TEST_TOKENS = 48
_PROMPT = "Name three things that make a city pleasant to live in."


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: str
    """``ok``, ``warn`` (works, but worse than it could) or ``bad``."""
    topic: str
    what: str
    cure: str = ""


def examine(*, self_test: bool = True) -> Iterator[Finding]:
    """All findings, in the order in which they are found out."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding(
        "ok", "platform", f"dflash-local {__version__}, Python {sys.version.split()[0]}, {system}"
    )
    yield from _versions()
    yield from _device()
    yield from _folders()
    yield from _network()
    yield from _pairs()
    if self_test:
        yield from _self_test()


def _versions() -> Iterator[Finding]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield Finding("ok", "versions", ", ".join(f"{name} {v}" for name, v in found.items()))
    bnb = found.get("bitsandbytes")
    if bnb and tuple(int(p) for p in bnb.split(".")[:2] if p.isdigit()) < (0, 50):
        yield Finding(
            "warn",
            "kernels",
            f"bitsandbytes {bnb} has no 4-bit kernels for small batches, so verifying is slow",
            "pip install -U 'bitsandbytes>=0.50'",
        )
    if shutil.which("nvidia-smi") and find_spec("torch") and "+cpu" in found.get("torch", ""):
        yield Finding(
            "bad",
            "kernels",
            "there is an NVIDIA card, but this PyTorch is the CPU build",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )


def _device() -> Iterator[Finding]:
    try:
        backend = backend_name()
    except DflashError as error:
        yield Finding("bad", "backend", error.cause, error.next_step)
        return
    room = free_memory.room(backend)
    text = f"{backend} on {room.device}: {gigabytes(room.free)} of {gigabytes(room.total)} free"
    low = room.free < 10**9
    cure = "close other programs before loading a model" if low else ""
    yield Finding("warn" if low else "ok", "device", text, cure)
    if room.kind == "cpu":
        kept = "weights in fp16, " if room.halves else ""
        how = "native bf16" if room.native_bf16 else f"no native bf16: {kept}computes in fp32"
        yield Finding("ok", "kernels", f"{how}; {os.cpu_count()} logical cores")
        if sys.platform == "linux" and free_memory.is_x86() and not free_memory.has_llvm():
            yield Finding(
                "warn",
                "kernels",
                "attention is not compiled for this CPU, so rounds take a quarter longer",
                "pip install -U llvmlite",
            )


def _folders() -> Iterator[Finding]:
    folders = {
        "hub cache": paths.hub_cache_dir(),
        "cache": paths.cache_dir(),
        "settings": paths.config_dir(),
        "chats": paths.data_dir(),
        "logs": paths.log_dir(),
    }
    for name, folder in folders.items():
        problem = _unwritable(folder)
        cure = f"make {folder} writable, or move it (docs/cli.md names the variable)"
        yield Finding(
            "bad" if problem else "ok",
            f"folder, {name}",
            problem or str(folder),
            cure if problem else "",
        )
    free = storage.free_bytes()
    low = free < _LOW_DISK
    cure = "dflash-local du shows what models take, dflash-local rm frees it" if low else ""
    yield Finding("warn" if low else "ok", "disk", f"{gigabytes(free)} free for models", cure)
    count, begun = storage.partials()
    if count:
        yield Finding(
            "warn",
            "disk",
            f"{count} downloads are begun, {gigabytes(begun)}",
            "dflash-local pull goes on from them; dflash-local rm --partials removes them",
        )


def _unwritable(folder: Path) -> str:
    """Why a file cannot be made in a folder; empty when it can. Makes no folder."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}"


def _network() -> Iterator[Finding]:
    proxies = [name for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY") if os.environ.get(name)]
    via = f", through {proxies[0]}" if proxies else ""
    try:
        text = (
            "requests are forbidden by HF_HUB_OFFLINE" if offline() else f"{shown_endpoint()}{via}"
        )
    except DflashError as error:
        yield Finding("bad", "hub", error.cause, error.next_step)
        return
    yield Finding("ok", "hub", text)


def _pairs() -> Iterator[Finding]:
    try:
        pairs = registry.registry()
    except DflashError as error:
        yield Finding("bad", "registry", error.cause, error.next_step)
        return
    for pair in pairs.values():
        here = state(pair)
        if here == "ready":
            yield Finding("ok", f"pair, {pair.name}", "ready")
        elif here != "-":
            cure = f"dflash-local pull {pair.name}"
            yield Finding("warn", f"pair, {pair.name}", here, cure)
    absent = sum(state(pair) == "-" for pair in pairs.values())
    yield Finding("ok", "pairs", f"{len(pairs)} known, {absent} of them not on this machine")


def _self_test() -> Iterator[Finding]:
    """Plain and speculative answers of the demo must be equal, and drafting must help.

    Computed in fp32, where a near tie of two tokens cannot make equal computations differ.
    """
    if demo.installed() is None:
        yield Finding("warn", "self-test", "the demo is not here", "dflash-local pull demo")
        return
    from dflash_local.sampling import SamplingParams
    from dflash_local.select import load

    begun = time.monotonic()
    try:
        # A CPU that keeps fp16 weights by itself computes in fp32; so the chat's costs are told.
        halved = free_memory.room("torch").numbers == "fp16"
        with load("demo", context=512, dtype="fp16" if halved else "fp32") as engine:
            settings = SamplingParams(max_tokens=_TEST_TOKENS)
            spent = time.monotonic() - begun
            if spent > _TEST_SECONDS:  # a busy machine: fewer tokens say enough
                settings = SamplingParams(max_tokens=16)
            info, costs = engine.info, engine.costs
            drafted = engine.complete(_PROMPT, settings, block=info.block_size, reuse=False)
            plain = engine.complete(_PROMPT, settings, block=0, reuse=False)
    except DflashError as error:
        yield Finding("bad", "self-test", error.cause, error.next_step)
        return
    if info.kernels:
        slow = any(words.startswith("no CUDA graphs") for words in info.kernels)
        yield Finding(
            "warn" if slow else "ok",
            "forward",
            f"{info.dtype}; {', '.join(info.kernels)}",
            "answers are right, but slower; update torch and the driver" if slow else "",
        )
    rates = f"{drafted.stats.tok_s:.0f} against {plain.stats.tok_s:.0f} tok/s plain"
    stats = f"tau {drafted.stats.tau:.2f}, {rates}"
    took = f"{time.monotonic() - begun:.0f} s"
    if drafted.tokens != plain.tokens:
        yield Finding(
            "bad",
            "self-test",
            f"speculative and plain decoding differ ({stats})",
            "run dflash-local bench and report what it prints; --plain is safe meanwhile",
        )
    elif drafted.stats.tau < 1.2:
        yield Finding(
            "warn",
            "self-test",
            f"ids are equal, but drafts are hardly accepted ({stats})",
            "dflash-local pull demo; if that does not help, try --dtype fp32",
        )
    else:
        yield Finding("ok", "self-test", f"{len(plain.tokens)} ids equal, {stats}, {took}")
    if costs is not None:
        yield _drafting(costs, drafted.rounds)


def _drafting(costs: Costs, rounds: Sequence[Round]) -> Finding:
    """Whether drafting pays here: what rounds cost, as remembered, against what they yielded."""
    width = AutoWidth(costs)
    for round_ in rounds:
        width.observe(round_)
    # Wider rounds than were drafted are not known.
    most = max((round_.drafted for round_ in rounds), default=0)
    gains = [
        tokens * costs.ms[0] / ms
        for tokens, ms in zip(width.expected()[: most + 1], costs.ms, strict=False)
    ]
    count = max(range(1, len(gains)), key=gains.__getitem__, default=0)
    best = gains[count]
    ratio = costs.ms[count] / costs.ms[0]
    what = f"a round that drafts {count} costs {ratio:.1f} plain steps here"
    if best > 1.01:
        return Finding("ok", "drafting", f"pays on the demo, up to {best:.2f} times plain: {what}")
    return Finding(
        "warn",
        "drafting",
        f"does not pay on the demo, {best:.2f} times plain at best: {what}, so the automatic width "
        "parks the draft and answers keep plain speed",
        "if the machine was busy when this was measured, delete "
        f"{costs_folder()} and run again; else a larger target, a GPU or a CPU with native bf16 "
        "gains more",
    )
