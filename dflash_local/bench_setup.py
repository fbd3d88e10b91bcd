"""What was benched, where and how: the facts that every figure needs beside it."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dflash_local import __version__
from dflash_local.bench_prompts import prompts_hash
from dflash_local.engine import Engine
from dflash_local.errors import OptionError


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of several measurements and how far they reach."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Setup:
    """A pair on a machine, and what it was asked."""

    model: str
    draft: str
    backend: str
    device: str
    dtype: str
    quantization: str
    kernels: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    platform: str
    processor: str
    prompts: str
    """Hash of the prompts."""
    prompt_count: int
    max_tokens: int
    thinking: bool | None
    """None: the template's default."""
    template: str
    """Hash of what the template makes of one short message, ``thinking`` included."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        prompts: Sequence[tuple[str, str]],
        max_tokens: int,
        thinking: bool | None,
    ) -> Setup:
        """The setup of a bench that is about to run.

        Raises:
            OptionError: the pair has no draft, or there is no prompt.
        """
        info = engine.info
        if info.draft is None:
            raise OptionError("There is no draft to bench.", "Load a pair with one.")
        if not prompts:
            raise OptionError("There is no prompt to bench.", "Give --prompts 1 or more.")
        rendered = engine.tokenizer.render([{"role": "user", "content": "Hello."}], thinking)
        return cls(
            model=info.target,
            draft=info.draft,
            backend=info.backend,
            device=info.device,
            dtype=info.dtype,
            quantization=info.quantization,
            kernels=info.kernels,
            versions=(
                ("dflash-local", __version__),
                ("python", platform.python_version()),
                *info.versions,
            ),
            platform=f"{platform.system()} {platform.machine()}",
            processor=processor(),
            prompts=prompts_hash(prompts),
            prompt_count=len(prompts),
            max_tokens=max_tokens,
            thinking=thinking,
            template=hashlib.sha256(rendered.encode()).hexdigest()[:12],
        )


def peak_resident() -> int:
    """Most bytes of main memory that this process has held; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def processor() -> str:
    """The name of this machine's processor, as far as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
