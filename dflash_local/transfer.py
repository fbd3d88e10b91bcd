"""One file over HTTP: resumed from a named partial, hashed on the way, moved in when it verifies.

The partial carries the file's etag in its name, so what is resumed is always the same content. One
lock per file lets only one process fetch it; the others wait and find it made.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_local import disk
from dflash_local.errors import DownloadError

PARTIAL_SUFFIX = ".dflash-partial"
_CHUNK = 1 << 20
_GIVE_BACK = 256 * 2**20
"""Bytes of a partial that are dropped where the disk ran full, so that it is not left full."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that the hub lists."""

    name: str
    url: str
    size: int
    etag: str
    """sha256 of a large file, git's blob id (sha1) of a small one; also its name in the cache."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a transfer keeps trying."""

    attempts: int = 6
    """Tries in a row that brought no new byte."""
    first_delay: float = 1.0
    """Seconds before the second try; doubles up to ``longest_delay``."""
    longest_delay: float = 30.0
    longest_wait: float = 600.0
    """Most seconds that a server's Retry-After is followed."""
    timeout: float = 30.0
    """Seconds without a byte before a connection counts as dropped."""


class Watch(Protocol):
    """Who is told about a transfer, and who may end it."""

    cancelled: threading.Event

    def at(self, file: str, done: int, received: int = 0) -> None:
        """``done`` bytes of a file are here, ``received`` of them just now."""
        ...

    def retry(self, file: str, reason: str, seconds: float) -> None:
        """A failure that may pass; the next try comes after ``seconds``."""
        ...

    def wait(self, file: str) -> None:
        """Another process fetches this file."""
        ...


class Response(Protocol):
    """What is used of a streamed response; httpx and its successor both fit."""

    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def history(self) -> list[Any]: ...
    def iter_raw(self) -> Iterator[bytes]: ...


class Client(Protocol):
    """What is used of an HTTP client."""

    def stream(
        self, method: str, url: str, *, headers: Mapping[str, str], timeout: float
    ) -> AbstractContextManager[Response]: ...


class Refused(Exception):
    """The server will not hand out the file; ``status`` and ``code`` say why."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(f"status {status} {code}".strip())
        self.status = status
        self.code = code


class Changed(Exception):
    """The server now holds other content under this name than it listed."""


class Cancelled(Exception):
    """The watch asked to stop; the partial stays."""


class _Passing(Exception):
    """A failure that another try may overcome."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


def partial_of(blob: Path) -> Path:
    """Where the beginning of a file is kept."""
    return blob.with_name(blob.name + PARTIAL_SUFFIX)


def fetch(
    file: RemoteFile,
    blob: Path,
    lock: Path,
    client: Client,
    headers: Mapping[str, str],
    watch: Watch,
    patience: Patience,
) -> None:
    """Bring one file to ``blob``, unless it is there.

    Raises:
        Refused, Changed, Cancelled: see there.
        DownloadError: it could not be had intact.
        OSError: the disk is full or cannot be written.
    """
    if is_whole(blob, file.size):
        watch.at(file.name, file.size)
        return
    with only_one(lock, watch, file.name):
        if not is_whole(blob, file.size):
            partial = partial_of(blob)
            _fill(file, partial, client, headers, watch, patience)
            os.replace(partial, blob)
    watch.at(file.name, file.size)


def is_whole(blob: Path, size: int) -> bool:
    """Whether a finished file is there with the right size; its hash was checked when it came."""
    try:
        return blob.stat().st_size == size
    except OSError:
        return False


@contextmanager
def only_one(lock: Path, watch: Watch, name: str) -> Iterator[None]:
    """Hold a lock file; while another process has it, say so once and keep listening to a stop."""
    from filelock import FileLock, Timeout

    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = FileLock(lock)
    told = False
    while True:
        try:
            handle.acquire(timeout=0.2 if told else 0)
            break
        except Timeout:
            if not told:
                watch.wait(name)
            told = True
            if watch.cancelled.is_set():
                raise Cancelled from None
    try:
        yield
    finally:
        handle.release()


def _fill(
    file: RemoteFile,
    partial: Path,
    client: Client,
    headers: Mapping[str, str],
    watch: Watch,
    patience: Patience,
) -> None:
    """Grow the partial until it has the right size and hash."""
    failures, delay, mended = 0, patience.first_delay, False
    while True:
        before = _size(partial)
        if before > file.size:
            partial.unlink()
            before = 0
        try:
            digest = _Digest(file, partial, watch)
            if digest.length < file.size:
                _receive(file, partial, digest, client, headers, watch, patience)
            if digest.matches():
                return
            partial.unlink()
            if mended:
                raise DownloadError(
                    f"{file.name} arrived twice with another checksum than the hub lists.",
                    "Nothing was installed. A proxy or mirror may alter files; check HF_ENDPOINT "
                    "and try again later.",
                )
            mended = True
            watch.retry(file.name, "its checksum is wrong, fetching it again", 0)
        except _Passing as problem:
            grown = _size(partial) > before
            failures = 1 if grown else failures + 1
            delay = patience.first_delay if grown else delay
            if failures >= patience.attempts:
                raise DownloadError(
                    f"{file.name} stopped at {_size(partial):,} of {file.size:,} bytes: {problem}.",
                    "Check the connection and run the same command again; it goes on from there.",
                ) from problem
            pause = delay if problem.wait is None else problem.wait
            if pause > patience.longest_wait:
                raise DownloadError(
                    f"The server asks to wait {pause:.0f} s before {file.name} may be fetched.",
                    "Run the same command again then; logging in (hf auth login) raises the limit.",
                ) from problem
            watch.retry(file.name, str(problem), pause)
            if watch.cancelled.wait(pause):
                raise Cancelled from None
            delay = min(2 * delay, patience.longest_delay)
        except OSError as error:
            if disk.is_full(error):
                _give_back(partial)
            raise


class _Digest:
    """The running hash over a partial and what is appended to it."""

    def __init__(self, file: RemoteFile, partial: Path, watch: Watch) -> None:
        self._file = file
        self._watch = watch
        self.restart()
        if left := _size(partial):
            with partial.open("rb") as stream:
                while chunk := stream.read(min(_CHUNK, left)):
                    left -= len(chunk)
                    if watch.cancelled.is_set():
                        raise Cancelled
                    self._hash.update(chunk)
                    self.length += len(chunk)
                    watch.at(file.name, self.length)

    def restart(self) -> None:
        """Begin again with no content."""
        self.length = 0
        if len(self._file.etag) == 64:
            self._hash = hashlib.sha256()
        else:  # git names a blob by the sha1 of this header and the content
            self._hash = hashlib.sha1(b"blob %d\0" % self._file.size, usedforsecurity=False)

    def add(self, chunk: bytes) -> None:
        """Count and hash bytes that were just written."""
        self._hash.update(chunk)
        self.length += len(chunk)
        self._watch.at(self._file.name, self.length, len(chunk))

    def matches(self) -> bool:
        """Whether size and hash are those that the hub lists."""
        return self.length == self._file.size and self._hash.hexdigest() == self._file.etag


def _receive(
    file: RemoteFile,
    partial: Path,
    digest: _Digest,
    client: Client,
    headers: Mapping[str, str],
    watch: Watch,
    patience: Patience,
) -> None:
    """One request, from where the partial ends, appended as it comes."""
    asked = {**headers, "Accept-Encoding": "identity"}
    if digest.length:
        asked["Range"] = f"bytes={digest.length}-"
    with (
        _dropped_as_passing(),
        client.stream("GET", file.url, headers=asked, timeout=patience.timeout) as response,
    ):
        _check(response, file, partial)
        if digest.length and not _continues(response, digest.length):
            digest.restart()
        with partial.open("ab" if digest.length else "wb", buffering=0) as out:
            for chunk in response.iter_raw():  # as it comes; a larger buffer is lost in a drop
                if watch.cancelled.is_set():
                    raise Cancelled
                fits = chunk[: file.size - digest.length]
                _write_all(out.write, fits)
                digest.add(fits)
                if len(fits) < len(chunk):
                    raise Changed
    if digest.length < file.size:
        raise _Passing("the connection ended early")


def _write_all(write: Callable[[bytes], int | None], data: bytes) -> None:
    """An unbuffered write may take only a part."""
    view = memoryview(data)
    while view:
        view = view[write(bytes(view)) or 0 :]


def _check(response: Response, file: RemoteFile, partial: Path) -> None:
    """Sort a response's status; compare the etag that the hub itself sent."""
    status = response.status_code
    if status in (200, 206):
        hub = response.history[0] if response.history else response
        etag = hub.headers.get("X-Linked-Etag")
        if etag is None and not response.history:
            etag = hub.headers.get("ETag")
        if etag is not None and etag.removeprefix("W/").strip('"') != file.etag:
            raise Changed
        return
    if status == 416:
        partial.unlink(missing_ok=True)
        raise _Passing("the server has fewer bytes than were fetched, starting over")
    if status == 429 or status >= 500 or status == 408:
        reason = (
            "the server asks to slow down" if status == 429 else f"the server answered {status}"
        )
        raise _Passing(reason, retry_after(response.headers))
    raise Refused(status, response.headers.get("X-Error-Code", ""))


def _continues(response: Response, start: int) -> bool:
    """Whether the body begins at ``start``; a server may ignore the range."""
    return response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
        f"bytes {start}-"
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date."""
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    import email.utils

    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def http_errors() -> tuple[type[Exception], ...]:
    """The error roots of the HTTP clients in this process, whichever the hub's library brought."""
    modules = (sys.modules.get(name) for name in ("httpx2", "httpx"))
    here = [module for module in modules if module is not None]
    return tuple(error for m in here for error in (m.HTTPError, m.InvalidURL))


@contextmanager
def _dropped_as_passing() -> Iterator[None]:
    """Errors of the network become failures that may pass; errors of the disk stay themselves."""
    try:
        yield
    except http_errors() as error:
        raise _Passing(" ".join(str(error).split()) or type(error).__name__) from error


def _give_back(partial: Path) -> None:
    """Free the end of a partial on a full disk; what stays can still be resumed."""
    with contextlib.suppress(OSError):
        keep = _size(partial) - _GIVE_BACK
        if keep > 0:
            os.truncate(partial, keep)
        else:
            partial.unlink()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
