"""Measures what a pair really takes at its peak: run as a script in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def torch_peak(target: Path, draft: Path, context: int, dtype: str) -> int:
    """Growth of the resident set from before the load to the peak of a full context."""
    import tempfile

    from dflash_local.backends.torch_load import open_pair
    from tests.support.kits import Options
    from tests.support.tiny import loop_pair

    with tempfile.TemporaryDirectory() as folder:  # libraries and thread pools load here
        small = Options(context=64, dtype=dtype)
        warm = open_pair(*loop_pair(Path(folder)), small, lambda step: None)
        _fill(warm, 64)
        warm.close()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    options = Options(context=context, dtype=dtype)
    backend = open_pair(target, draft, options, lambda step: None)
    _fill(backend, context)
    return _status("VmHWM") - before


def mlx_peak(target: Path, draft: Path, context: int, dtype: str) -> int:
    """MLX's own count of its peak."""
    import mlx.core as mx

    from dflash_local.backends.mlx_load import open_pair
    from tests.support.kits import Options

    mx.reset_peak_memory()
    backend = open_pair(target, draft, Options(context=context, dtype=dtype), lambda step: None)
    _fill(backend, context)
    return int(mx.get_peak_memory())


def _fill(backend: object, context: int) -> None:
    """A prompt that leaves room for three rounds, then those rounds."""
    from dflash_local.sampling import SamplingParams

    b: Any = backend
    b.configure(SamplingParams())
    size = b.info.block_size
    room = context - 4 * size
    for start in range(0, room, 512):
        b.extend([7 + i % 50 for i in range(min(512, room - start))])
    pending = b.sample()
    for _ in range(3):
        verdict = b.verify(b.propose(pending, size - 1))
        b.commit(verdict.accepted + 1)
        pending = verdict.next


if __name__ == "__main__":
    name, target_arg, draft_arg, context_arg, dtype_arg = sys.argv[1:]
    measure = {"torch": torch_peak, "mlx": mlx_peak}[name]
    print(json.dumps(measure(Path(target_arg), Path(draft_arg), int(context_arg), dtype_arg)))
