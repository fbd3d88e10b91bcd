"""How much memory a backend may take on this machine now; asks the system, loads no framework."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_SHARE_OF_WORKING_SET = 0.9
_GPU_RESERVE = 768 * 2**20
"""Left to the desktop and the driver's own context."""
_RAM_RESERVE = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of one device."""

    kind: str
    """``cuda``, ``metal`` or ``cpu``."""
    device: str
    free: int
    """Bytes that may be taken now, reserves already left out."""
    total: int
    native_bf16: bool = True
    """Whether it multiplies bf16 itself; a CPU without it computes in fp32."""
    halves: bool = False
    """Whether torch keeps the weights of such a CPU in fp16."""
    packs: tuple[str, ...] = ()
    """Types whose weights torch brings into an order of the CPU's kernels, which is a copy."""

    @property
    def numbers(self) -> str:
        """The type that torch loads here by itself, as it is named in ``load``."""
        if self.kind != "cpu" or self.native_bf16:
            return "bf16"
        return "fp16" if self.halves else "fp32"


def room(backend: str) -> Room:
    """The room of the device that a backend uses."""
    if backend == "mlx" and platform.system() == "Darwin":
        return _metal()
    if backend == "torch" and (gpu := _nvidia()):
        return gpu
    free, total = ram()
    return Room(
        "cpu",
        "the CPU's memory",
        max(0, free - _RAM_RESERVE),
        total,
        cpu_bf16(),
        cpu_halves(),
        cpu_packs(),
    )


def ram() -> tuple[int, int]:
    """Available and total bytes of main memory; a container's limit counts. (0, 0) if unknown."""
    if sys.platform == "win32":
        return _windows_ram()
    if platform.system() == "Darwin":
        total = _sysctl("hw.memsize")
        pages = _sysctl("vm.page_free_count") + _sysctl("vm.page_speculative_count")
        reclaimable = _sysctl("vm.page_purgeable_count")
        free = (pages + reclaimable) * (_sysctl("hw.pagesize") or 16384)
        return max(free, total // 2), total
    fields = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields[key] = int(value.split()[0]) * 1024
    free, total = fields.get("MemAvailable", 0), fields.get("MemTotal", 0)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def cpu_bf16() -> bool:
    """Whether this CPU multiplies bf16 itself, as far as the system says."""
    return bool(_cpu_flags() & {"avx512_bf16", "amx_bf16"})


def cpu_fuses(*, half: bool) -> bool:
    """Whether attention is compiled here: on Linux on x86, where LLVM is installed. In bf16 it
    needs AVX512's products of pairs."""
    needed = {"avx512_bf16"} if half else {"avx2", "fma"}
    return needed <= _cpu_flags() and has_llvm()


def has_llvm() -> bool:
    """Whether an LLVM is installed that is new enough."""
    with contextlib.suppress(PackageNotFoundError, ValueError):
        return tuple(map(int, version("llvmlite").split(".")[:2])) >= (0, 46)
    return False


def cpu_packs() -> tuple[str, ...]:
    """The types that the library of CPU kernels takes here.

    For bf16 it asks for certain units; fp32 is packed where several threads share a product.
    """
    if not is_x86():
        return ()
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= _cpu_flags()
    several = cpu_threads() > 1
    return ("bf16",) * wide + ("fp32",) * several


def cpu_halves() -> bool:
    """Whether the CPU multiplies fp32 states with fp16 weights; all of ten years do, so what the
    system does not say is taken for a yes."""
    flags = _cpu_flags()
    return is_x86() and (not flags or {"avx2", "f16c"} <= flags)


def is_x86() -> bool:
    """Whether the CPU is of the kind that the ways of multiplying were timed on."""
    return platform.machine().lower() in ("x86_64", "amd64")


def cpu_threads() -> int:
    """Threads for the small products of a decode step.

    They wait for each other at every operator, so a thread on a busy core stalls all; half of
    the physical cores leaves room for the rest of the machine.
    """
    return max(1, min(8, (os.cpu_count() or 2) // 4))


def _cpu_flags() -> set[str]:
    """What the first core can do; empty where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split())
    return set()


def _nvidia() -> Room | None:
    """The first NVIDIA card, by nvidia-smi, which ships with the driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.free,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
        name, free, total = (part.strip() for part in done.stdout.splitlines()[0].rsplit(",", 2))
        available = max(0, int(free) * 2**20 - _GPU_RESERVE)
        return Room("cuda", name, available, int(total) * 2**20)
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def _metal() -> Room:
    """Unified memory: the working set that Metal recommends, which a sysctl may raise."""
    total = _sysctl("hw.memsize")
    limit = _sysctl("iogpu.wired_limit_mb") * 2**20
    recommended = limit or int(total * (0.75 if total > 36 * 2**30 else 2 / 3))
    return Room("metal", "the GPU", int(recommended * _SHARE_OF_WORKING_SET), total)


def _sysctl(name: str) -> int:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10)
        return int(done.stdout.strip() or 0)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0


def _windows_ram() -> tuple[int, int]:
    if sys.platform != "win32":
        return 0, 0

    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *(
                (name, ctypes.c_ulonglong)
                for name in ("total", "free", "tp", "fp", "tv", "fv", "x")
            ),
        )

    status = Status()
    status.length = ctypes.sizeof(Status)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return 0, 0
    return int(status.free), int(status.total)
