from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_local import places
from dflash_local import pull as pulling
from dflash_local.errors import DownloadError
from dflash_local.hub import wanted
from dflash_local.hub_cache import RepoFolder, recorded
from dflash_local.pairs import Files
from dflash_local.progress import PullProgress
from dflash_local.pull import pull
from dflash_local.transfer import Patience, partial_of
from tests.support.hub_server import Fault, HubServer, etag

REPO = "org/model"
WEIGHTS = bytes(range(256)) * 4000
QUICK = Patience(attempts=4, first_delay=0.01, longest_delay=0.02, longest_wait=2, timeout=20)
MODEL = {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}


@pytest.fixture
def hub(private_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer()
    server.repos[REPO] = dict(MODEL)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN_PATH", str(private_folders / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


def _blob(data: bytes = WEIGHTS, repo: str = REPO) -> Path:
    return RepoFolder(repo).home / "blobs" / etag(data)


def _pull(*, update: bool = False, report: Callable[[PullProgress], None] | None = None) -> Path:
    steps = report or (lambda step: None)
    return pull([Files(repo=REPO)], update=update, progress=steps, patience=QUICK).folders[REPO]


def _check_whole(folder: Path) -> None:
    for name, data in MODEL.items():
        assert (folder / name).read_bytes() == data
    assert places.find(REPO) == folder
    assert not RepoFolder(REPO).partials()


def test_a_repository_arrives_in_the_cache_layout_of_the_hub(hub: HubServer) -> None:
    hub.repos[REPO] |= {
        "pytorch_model.bin": b"x",
        "modeling.py": b"x",
        "README.md": b"x",
        "original/model.safetensors": b"x",
    }
    steps: list[PullProgress] = []
    folder = _pull(report=steps.append)
    _check_whole(folder)
    assert sorted(p.name for p in folder.iterdir()) == sorted(MODEL)
    assert folder == RepoFolder(REPO).home / "snapshots" / hub.commit(REPO)
    assert (RepoFolder(REPO).home / "refs" / "main").read_text() == hub.commit(REPO)
    assert recorded(REPO)["revision"] == hub.commit(REPO)
    last = steps[-1]
    assert (last.done, last.total) == (sum(map(len, MODEL.values())),) * 2
    assert pickle.loads(pickle.dumps(last)) == last  # noqa: S301
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(REPO, "config.json", cache_dir=os.environ["HF_HUB_CACHE"])
    assert found == str(folder / "config.json")


def test_a_second_pull_asks_nothing(hub: HubServer) -> None:
    _pull()
    before = hub.listings, len(hub.requests)
    assert pull([Files(repo=REPO)], patience=QUICK).received == 0
    assert (hub.listings, len(hub.requests)) == before


def test_dropped_at_60_percent_goes_on_from_there(hub: HubServer) -> None:
    hub.faults["model.safetensors"] = [Fault(drop_at=0.6), Fault(status=503, times=9)]
    with pytest.raises(DownloadError, match=r"stopped at 614,400 of 1,024,000 bytes"):
        _pull()
    assert places.find(REPO) is None
    assert partial_of(_blob()).stat().st_size == 614_400
    hub.faults.clear()
    hub.requests.clear()
    _check_whole(_pull())
    assert [(r.start, r.sent) for r in hub.requests if r.file == "model.safetensors"] == [
        (614_400, 409_600)
    ]


def test_a_drop_is_mended_within_one_pull(hub: HubServer) -> None:
    hub.faults["model.safetensors"] = [Fault(drop_at=0.5), Fault(drop_at=0.5)]
    steps: list[PullProgress] = []
    _check_whole(_pull(report=steps.append))
    assert hub.bytes_sent("model.safetensors") == len(WEIGHTS)
    assert any(step.stage == "retry" and "next try in" in step.note for step in steps)


def _child(private: Path, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_local", "pull", REPO, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_killed_in_mid_file_then_resumed(hub: HubServer, private_folders: Path, how: str) -> None:
    if sys.platform == "win32" and how == "interrupt":
        pytest.skip("no SIGINT to another process")
    hub.faults["model.safetensors"] = [Fault(hold_at=700_000)]
    child = _child(private_folders)
    try:
        assert hub.held.wait(60)
        while not partial_of(_blob()).exists() or partial_of(_blob()).stat().st_size < 700_000:
            assert child.poll() is None
            hub.release.wait(0.02)
        child.send_signal(signal.SIGINT) if how == "interrupt" else child.kill()
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    if how == "interrupt":
        assert child.returncode == 130
        assert err.decode().splitlines()[-1] == "dflash-local: stopped"
    assert places.find(REPO) is None
    assert partial_of(_blob()).stat().st_size == 700_000
    hub.release.set()
    hub.requests.clear()
    _check_whole(_pull())
    weights = [r for r in hub.requests if r.file == "model.safetensors" and r.start >= 700_000]
    assert (700_000, len(WEIGHTS) - 700_000) in [(r.start, r.sent) for r in weights]


def test_changed_files_start_afresh_and_the_old_beginning_is_swept(hub: HubServer) -> None:
    hub.faults["model.safetensors"] = [Fault(drop_at=0.6), Fault(status=503, times=9)]
    with pytest.raises(DownloadError):
        _pull()
    hub.faults.clear()
    hub.repos[REPO]["model.safetensors"] = new = WEIGHTS[::-1]
    steps: list[PullProgress] = []
    folder = _pull(report=steps.append)
    assert (folder / "model.safetensors").read_bytes() == new
    assert not RepoFolder(REPO).partials()
    swept = [step for step in steps if step.stage == "swept"]
    assert [step.note for step in swept] == ["removed 1 left-over partial file, 1 MB"]


def test_an_etag_that_differs_from_the_listing_asks_again(hub: HubServer) -> None:
    hub.faults["model.safetensors"] = [Fault(etag="f" * 64)]
    _check_whole(_pull())
    assert hub.listings == 2
    hub.faults["tokenizer.json"] = [Fault(etag="e" * 40, times=9)]
    hub.repos[REPO]["tokenizer.json"] = b'{"new": 1}'
    with pytest.raises(DownloadError, match="not what the hub lists"):
        _pull(update=True)
    assert (places.find(REPO) or Path()).joinpath("tokenizer.json").read_bytes() == b"{}"


def test_truncated_body_is_fetched_on(hub: HubServer) -> None:
    hub.faults["model.safetensors"] = [Fault(truncate=True)]
    _check_whole(_pull())
    assert hub.bytes_sent("model.safetensors") == len(WEIGHTS)


def test_wrong_hash_is_fetched_again_once_and_then_refused(hub: HubServer) -> None:
    hub.faults["model.safetensors"] = [Fault(corrupt=True)]
    _check_whole(_pull())
    hub.repos[REPO]["model.safetensors"] = WEIGHTS[::-1]
    hub.faults["model.safetensors"] = [Fault(corrupt=True, times=9)]
    with pytest.raises(DownloadError, match="another checksum"):
        _pull(update=True)
    assert not RepoFolder(REPO).partials()
    assert places.find(REPO) is not None, "the old revision is still there"


@pytest.mark.parametrize(
    ("where", "fault", "cause", "step"),
    [
        ("api", Fault(status=401), "does not show org/model", "hf auth login"),
        ("api", Fault(status=403), "is gated", "hf auth login"),
        (
            "model.safetensors",
            Fault(status=403, headers={"X-Error-Code": "GatedRepo"}),
            "org/model is gated",
            "/org/model, log in with: hf auth login",
        ),
        ("model.safetensors", Fault(status=401), "does not show org/model", "hf auth login"),
        ("api", Fault(status=404), "There is no org/model", "spelling"),
        ("model.safetensors", Fault(status=404), "There is no org/model", "spelling"),
        (
            "model.safetensors",
            Fault(status=429, headers={"Retry-After": "7200"}),
            "asks to wait 7200 s",
            "raises the limit",
        ),
        ("api", Fault(status=429, times=9, headers={"Retry-After": "7200"}), "7200 s", "later"),
    ],
)
def test_refusals_say_what_to_do(
    hub: HubServer, where: str, fault: Fault, cause: str, step: str
) -> None:
    hub.faults[where] = [Fault(fault.times, fault.status, fault.headers)]
    with pytest.raises(DownloadError, match=cause) as caught:
        _pull()
    assert step in caught.value.next_step
    assert places.find(REPO) is None


def test_retry_after_is_followed(hub: HubServer) -> None:
    hub.faults["model.safetensors"] = [Fault(status=429, headers={"Retry-After": "1"})]
    hub.faults["api"] = [Fault(status=429, headers={"Retry-After": "0"})]
    steps: list[PullProgress] = []
    _check_whole(_pull(report=steps.append))
    assert any(s.note.endswith("slow down; next try in 1 s") for s in steps)


def test_stale_partials(hub: HubServer) -> None:
    blob = _blob()
    blob.parent.mkdir(parents=True)
    partial_of(blob).write_bytes(WEIGHTS)  # whole, only the rename is missing: no request for it
    _check_whole(_pull())
    assert hub.bytes_sent("model.safetensors") == 0
    blob.unlink()
    partial_of(blob).write_bytes(b"\0" * len(WEIGHTS))  # full size, wrong content
    _check_whole(_pull())
    assert hub.bytes_sent("model.safetensors") == len(WEIGHTS)
    blob.unlink()
    partial_of(blob).write_bytes(WEIGHTS + b"more")
    _check_whole(_pull())


def test_a_server_with_fewer_bytes_than_the_partial_starts_over(hub: HubServer) -> None:
    blob = _blob()
    blob.parent.mkdir(parents=True)
    partial_of(blob).write_bytes(WEIGHTS[:1000])
    hub.faults["model.safetensors"] = [Fault(status=416)]
    _check_whole(_pull())
    assert hub.bytes_sent("model.safetensors") == len(WEIGHTS)


def test_a_server_that_ignores_ranges(hub: HubServer) -> None:
    blob = _blob()
    blob.parent.mkdir(parents=True)
    partial_of(blob).write_bytes(WEIGHTS[:1000])
    hub.faults["model.safetensors"] = [Fault(ignore_range=True)]
    _check_whole(_pull())


def test_read_only_cache_names_the_folder(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(DownloadError, match="blobs cannot be written: Read-only") as caught:
        _pull()
    assert "HF_HUB_CACHE" in caught.value.next_step
    assert hub.requests == []


def test_too_little_space_is_refused_with_both_numbers(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 2_000_000})()
    monkeypatch.setattr("shutil.disk_usage", lambda where: usage)
    with pytest.raises(DownloadError, match=r"68 MB are needed and the disk of .* has 2 MB free"):
        _pull()
    assert hub.requests == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_disk_that_fills_up_in_mid_file(hub: HubServer) -> None:
    blob = _blob()
    blob.parent.mkdir(parents=True)
    partial_of(blob).symlink_to("/dev/full")
    with pytest.raises(DownloadError, match=r"filled up: 1 MB are still missing"):
        _pull()
    assert places.find(REPO) is None
    assert not partial_of(blob).is_symlink(), "the space was given back"


def test_two_processes_fetch_every_byte_once(hub: HubServer, private_folders: Path) -> None:
    hub.faults["model.safetensors"] = [Fault(hold_at=500_000)]
    children = [_child(private_folders)]
    assert hub.held.wait(60)
    children.append(_child(private_folders))
    try:
        assert children[1].stderr is not None
        for line in children[1].stderr:
            if b"another process is fetching model.safetensors" in line:
                break
        hub.release.set()
        folders = [json.loads(child.communicate(timeout=60)[0])["target"] for child in children]
    finally:
        for child in children:
            child.kill()
    assert folders[0] == folders[1]
    assert hub.bytes_sent("model.safetensors") == len(WEIGHTS)
    _check_whole(Path(folders[0]))


def test_ten_files_come_in_parallel(hub: HubServer) -> None:
    shards = {f"model-{n:05}-of-00010.safetensors": bytes([n]) * 50_000 for n in range(10)}
    index = {"weight_map": {f"w{n}": name for n, name in enumerate(shards)}}
    hub.repos[REPO] = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **shards,
    }
    hub.barrier = threading.Barrier(2)  # every large file waits for another one in flight
    folder = _pull()
    assert all((folder / name).read_bytes() == data for name, data in shards.items())
    assert 2 <= hub.most_active <= pulling.PARALLEL


def test_everything_cached_and_no_network(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _pull()

    def blocked(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", blocked)
    monkeypatch.setattr(socket, "create_connection", blocked)
    assert _pull() == folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert _pull() == folder
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids"):
        pull([Files(repo="org/other")], patience=QUICK)


def test_unreachable_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.close()
    with pytest.raises(DownloadError, match="could not be reached") as caught:
        _pull()
    assert "HTTPS_PROXY" in caught.value.next_step


def test_token_goes_to_the_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    _pull()
    assert all(request.authorised for request in hub.requests)


def test_without_links_files_are_still_found(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    monkeypatch.setattr(os, "symlink", refuse)
    _check_whole(_pull())
    monkeypatch.setattr(os, "link", refuse)
    hub.repos[REPO]["extra.json"] = b"{}"
    _check_whole(_pull(update=True))


def test_a_size_that_the_listing_leaves_open_is_asked_for(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.open_sizes = True
    _check_whole(_pull())
    assert hub.heads == len(MODEL)
    hub.repos["org/other"] = dict(MODEL)
    usage = type("Usage", (), {"free": 2_000_000})()
    monkeypatch.setattr("shutil.disk_usage", lambda where: usage)
    with pytest.raises(DownloadError, match="68 MB are needed"):
        pull([Files(repo="org/other")], patience=QUICK)


def test_a_size_that_nobody_says_is_one_line(hub: HubServer) -> None:
    hub.open_sizes = True
    hub.faults["model.safetensors"] = [Fault(status=404, times=9)]
    with pytest.raises(DownloadError, match="does not say size and checksum of org/model/model"):
        _pull()
    assert places.find(REPO) is None


def test_repositories_without_safetensors_are_refused(hub: HubServer) -> None:
    hub.repos[REPO] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(DownloadError, match=r"no safetensors weights \(only bin, json\)"):
        _pull()
    assert wanted(["consolidated.safetensors", "model.safetensors", "a.py", "x/b.json"]) == [
        "model.safetensors"
    ]
    assert wanted(["weights.safetensors", "pytorch_model.bin.index.json"]) == [
        "weights.safetensors"
    ]


def test_models_of_other_tools_are_found(
    private_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("")
        return folder

    monkeypatch.setenv("HOME", str(private_folders))
    monkeypatch.setenv("USERPROFILE", str(private_folders))
    old = model(private_folders / ".cache/lm-studio/models/org/a")
    assert pull([Files(repo="org/a")]).folders == {"org/a": old}
    new = model(private_folders / ".lmstudio/models/org/a")
    assert places.look_up("org/a") == places.Place(new, places.LM_STUDIO)
    own = model(private_folders / "mine/org--a")
    config = Path(os.environ["DFLASH_CONFIG"]) / "models.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'schema = 1\nfolders = ["{(private_folders / "mine").as_posix()}"]\n')
    assert places.look_up("org/a") == places.Place(own, places.OWN)
