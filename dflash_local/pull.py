"""Fetches pairs and repositories: list, check the disk, transfer in parallel, verify, publish.

Files that are here already, wherever they lie, cost no request. What was interrupted goes on.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_local import demo, disk, hub, paths, places
from dflash_local.errors import DownloadError
from dflash_local.hub import Listing
from dflash_local.hub_cache import RepoFolder
from dflash_local.pairs import Files
from dflash_local.progress import Meter, PullProgress, PullReport, PullStage, silent
from dflash_local.transfer import (
    Cancelled,
    Changed,
    Patience,
    Refused,
    RemoteFile,
    fetch,
    is_whole,
    partial_of,
)

PARALLEL = 8
_ELSEWHERE = "Make it writable, or point HF_HUB_CACHE at another folder."


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a pull brought or found."""

    folders: dict[str, Path]
    """The folder of each repository asked for."""
    received: int
    """Bytes that had to be fetched."""


def pull(
    wanted: Sequence[Files],
    *,
    name: str = "",
    update: bool = False,
    progress: PullReport = silent,
    patience: Patience | None = None,
) -> Fetched:
    """Bring the files of a pair, or of any repositories, to this machine.

    Args:
        wanted: what to fetch; a target and its draft, for example.
        name: what events call the whole.
        update: ask the hub for newer revisions of what is here.
        progress: gets every step; may be called from other threads, one at a time.
        patience: how long to keep trying.

    Raises:
        DownloadError: it says what failed; nothing incomplete is visible to ``load``.
    """
    patience = patience or Patience()
    folders: dict[str, Path] = {}
    listings: list[tuple[Files, Listing]] = []
    for files in wanted:
        if files.source == "demo":
            folders[files.repo] = demo.ensure(_demo_report(files.repo, progress))
        elif files.source == "package":
            folders[files.repo] = demo.draft_folder()
        elif files.source == "folder":
            folders[files.repo] = _own_folder(files.repo)
        elif not update and (found := places.find(files.repo, files.revision)):
            folders[files.repo] = found
        else:
            progress(PullProgress("listing", files.repo))
            listings.append((files, hub.list_files(files.repo, files.revision, patience)))
    if not listings:
        return Fetched(folders, 0)
    try:
        received = _bring(listings, name, progress, patience)
        for files, listing in listings:
            folders[files.repo] = RepoFolder(files.repo).publish(listing, files.revision)
    except OSError as error:
        raise _explain(error, listings) from error
    return Fetched(folders, received)


def missing_bytes(listings: Sequence[Listing]) -> int:
    """Bytes still to fetch: all files less what is whole or begun."""
    missing = 0
    for listing in listings:
        for file in listing.files:
            blob = RepoFolder(listing.repo).blob(file)
            if not is_whole(blob, file.size):
                with contextlib.suppress(OSError):
                    missing -= min(partial_of(blob).stat().st_size, file.size)
                missing += file.size
    return missing


def _bring(
    listings: list[tuple[Files, Listing]], name: str, progress: PullReport, patience: Patience
) -> int:
    """Make every blob of the listings; a listing that went stale is asked for once more."""
    for round_ in (1, 2):
        homes = [RepoFolder(listing.repo) for _, listing in listings]
        for home, (_, listing) in zip(homes, listings, strict=True):
            disk.check_writable(home.home / "blobs", _ELSEWHERE)
            count, freed = home.sweep(listing)
            if count:
                note = f"removed {count} left-over partial {_files(count)}, {disk.amount(freed)}"
                progress(PullProgress("swept", listing.repo, done=freed, total=freed, note=note))
        _check_space([listing for _, listing in listings], homes[0].home)
        try:
            return _Crew(name, [listing for _, listing in listings], progress, patience).work()
        except _Stale as stale:
            if round_ == 2:
                raise DownloadError(
                    f"{stale.listing.repo}/{stale.file.name} is not what the hub lists, twice.",
                    "A mirror or proxy may serve old files; check HF_ENDPOINT and try again later.",
                ) from None
            partial_of(RepoFolder(stale.listing.repo).blob(stale.file)).unlink(missing_ok=True)
            progress(PullProgress("listing", stale.listing.repo, note="the files changed"))
            listings[:] = [
                (files, hub.list_files(files.repo, files.revision, patience))
                if listing is stale.listing
                else (files, listing)
                for files, listing in listings
            ]
    raise AssertionError("unreachable")


class _Stale(Exception):
    """A file is not what its listing says."""

    def __init__(self, listing: Listing, file: RemoteFile) -> None:
        super().__init__(file.name)
        self.listing = listing
        self.file = file


@dataclass(slots=True)
class _Watch:
    """Hands what a transfer says to the meter."""

    repo: str
    meter: Meter
    cancelled: threading.Event = field(default_factory=threading.Event)
    received: int = 0

    def at(self, file: str, done: int, received: int = 0) -> None:
        self.received += received
        self.meter.at(f"{self.repo}/{file}", done, received)

    def retry(self, file: str, reason: str, seconds: float) -> None:
        later = f"; next try in {seconds:.0f} s" if seconds else ""
        self.meter.note("retry", f"{self.repo}/{file}", f"{file}: {reason}{later}")

    def wait(self, file: str) -> None:
        self.meter.note("wait", f"{self.repo}/{file}", f"another process is fetching {file}")


class _Crew:
    """Threads that take files from one queue until it is empty or one of them fails.

    They are daemons: after Ctrl+C nobody waits for a read that hangs.
    """

    def __init__(
        self, name: str, listings: Sequence[Listing], progress: PullReport, patience: Patience
    ) -> None:
        total = sum(listing.total for listing in listings)
        meter = Meter(name or listings[0].repo, total, progress)
        self._patience = patience
        self._cancelled = threading.Event()
        self._jobs: queue.SimpleQueue[tuple[Listing, RemoteFile, _Watch]] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._watches = []
        # Largest first, so that the last one running is a small one; one etag only once.
        jobs = {(listing.repo, f.etag): (listing, f) for listing in listings for f in listing.files}
        for listing, file in sorted(jobs.values(), key=lambda job: -job[1].size):
            watch = _Watch(listing.repo, meter, self._cancelled)
            self._watches.append(watch)
            self._jobs.put((listing, file, watch))
        self._workers = min(PARALLEL, len(jobs))

    def work(self) -> int:
        """Run to the end and return the bytes received; the first failure is raised."""
        client, headers = hub.session()
        self._client, self._headers = client, headers
        for _ in range(self._workers):
            threading.Thread(target=self._main, name="dflash-pull", daemon=True).start()
        failure: BaseException | None = None
        try:
            for _ in range(self._workers):
                ended = self._failures.get()
                if ended is not None:
                    self._cancelled.set()
                    if failure is None or isinstance(failure, Cancelled):
                        failure = ended
        except KeyboardInterrupt:
            self._cancelled.set()
            raise
        if failure is not None:
            raise failure
        return sum(watch.received for watch in self._watches)

    def _main(self) -> None:
        try:
            while not self._cancelled.is_set():
                self._one(*self._jobs.get_nowait())
        except queue.Empty:
            self._failures.put(None)
        except BaseException as error:  # raised by the thread that waits
            self._failures.put(error)
        else:
            self._failures.put(None)

    def _one(self, listing: Listing, file: RemoteFile, watch: _Watch) -> None:
        home = RepoFolder(listing.repo)
        try:
            fetch(
                file,
                home.blob(file),
                home.lock(file),
                self._client,
                self._headers,
                watch,
                self._patience,
            )
        except Refused as refused:
            raise hub.explain_refusal(listing.repo, refused) from refused
        except Changed:
            raise _Stale(listing, file) from None


def _own_folder(place: str) -> Path:
    """A folder of the user's own; there is nothing to fetch."""
    folder = paths.existing_folder(place)
    if folder is None or not places.has_weights(folder):
        raise DownloadError(
            f"{place} holds no complete model.", "Correct the path in your own models.toml."
        )
    return folder


def _demo_report(repo: str, progress: PullReport) -> demo.Progress:
    """The demo's own steps as events."""
    stages: dict[str, PullStage] = {
        "wait": "wait",
        "download": "download",
        "unpack": "unpack",
        "convert": "convert",
    }

    def show(stage: str, done: int, total: int) -> None:
        if known := stages.get(stage):
            progress(PullProgress(known, repo, done, total))

    return show


def _check_space(listings: Sequence[Listing], home: Path) -> None:
    """Refuse before the first byte where the disk cannot hold it all."""
    cure = (
        "Free some space (dflash-local du shows what models take), or point HF_HUB_CACHE at "
        "another disk."
    )
    disk.check_space(home, missing_bytes(listings), "", cure)


def _explain(error: OSError, listings: Sequence[tuple[Files, Listing]]) -> DownloadError:
    """An operating-system error as a cause and a next step."""
    home = RepoFolder(listings[0][1].repo).home
    if disk.is_full(error):
        missing = missing_bytes([listing for _, listing in listings])
        free = shutil.disk_usage(home.parent).free
        return DownloadError(
            f"The disk of {home.parent} filled up: {disk.amount(missing)} are still missing and "
            f"{disk.amount(free)} are free.",
            "Free some space and run the same command again; it goes on from there. "
            "dflash-local rm --partials gives back what is begun.",
        )
    return disk.cannot_write(error.filename or home, error, _ELSEWHERE)


def _files(count: int) -> str:
    return "file" if count == 1 else "files"
