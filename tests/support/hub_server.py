"""A small hub on this machine: lists repositories and serves their files, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 4096
"""Files of at least this size are served as large ones: by redirect, named by sha256."""


@dataclass
class Fault:
    """What goes wrong with the next answers for a file."""

    times: int = 1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    drop_at: float | None = None
    """Close the connection after this share of the body."""
    truncate: bool = False
    """Announce and send only half."""
    corrupt: bool = False
    etag: str | None = None
    hold_at: int | None = None
    """Stop sending after this many bytes until ``release`` is set."""
    ignore_range: bool = False


@dataclass(frozen=True)
class Request:
    """One request for a file's bytes."""

    file: str
    start: int
    sent: int
    authorised: bool


class HubServer:
    """Serves ``repos`` until closed."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.faults: dict[str, list[Fault]] = {}
        """By file name, or by ``api`` for the listing."""
        self.requests: list[Request] = []
        self.listings = self.heads = 0
        self.open_sizes = False
        """Leave sizes and checksums out of listings, as some mirrors do."""
        self.release = threading.Event()
        self.held = threading.Event()
        self.lock = threading.Lock()
        self.active = self.most_active = 0
        self.barrier: threading.Barrier | None = None
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repo: str) -> str:
        """A commit that depends on the content."""
        digest = hashlib.sha1()
        for name, data in sorted(self.repos[repo].items()):
            digest.update(name.encode() + data)
        return digest.hexdigest()

    def fault(self, name: str) -> Fault:
        """The fault that is due for this answer."""
        with self.lock:
            due = self.faults.get(name, [])
            if not due:
                return Fault()
            due[0].times -= 1
            return due.pop(0) if due[0].times <= 0 else due[0]

    def bytes_sent(self, file: str) -> int:
        """Bytes of a file that left the server, over all requests."""
        return sum(r.sent for r in self.requests if r.file == file)


def etag(data: bytes) -> str:
    """How the hub names content."""
    if len(data) >= LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._listing(hub, match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(hub, match[1], match[3])
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._body(hub, match[2], hub.repos[match[1]][match[2]], {})
        else:
            self._answer(404, b"")

    def do_HEAD(self) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        hub.heads += 1
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        data = hub.repos[match[1]].get(match[3]) if match else None
        due = hub.faults.get(match[3], []) if match else []
        if match is None or data is None or any(fault.status for fault in due):
            return self._answer(404, b"")
        self.send_response(200)
        self.send_header("ETag", f'"{etag(data)}"')
        self.send_header("X-Repo-Commit", hub.commit(match[1]))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()

    def _listing(self, hub: HubServer, repo: str, revision: str | None) -> None:
        hub.listings += 1
        fault = hub.fault("api")
        if fault.status:
            return self._answer(fault.status, b"{}", fault.headers)
        if repo not in hub.repos:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in (None, "main", hub.commit(repo)):
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        siblings: list[dict[str, Any]] = []
        for name, data in hub.repos[repo].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": etag(data)}
            if hub.open_sizes:
                entry = {"rfilename": name}
            elif len(data) >= LARGE:
                entry["lfs"] = {"sha256": etag(data), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        about = {"id": repo, "modelId": repo, "sha": hub.commit(repo), "siblings": siblings}
        self._answer(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _resolve(self, hub: HubServer, repo: str, name: str) -> None:
        data = hub.repos[repo][name]
        due = hub.faults.get(name)
        if due and due[0].status:
            fault = hub.fault(name)
            return self._answer(fault.status, b"", fault.headers)
        tag = hub.fault(name).etag if due and due[0].etag else etag(data)
        if len(data) >= LARGE:
            self._answer(
                302,
                b"",
                {
                    "Location": f"/cdn/{repo}/{name}",
                    "X-Linked-Etag": f'"{tag}"',
                    "X-Linked-Size": str(len(data)),
                    "X-Repo-Commit": hub.commit(repo),
                },
            )
        else:
            self._body(hub, name, data, {"ETag": f'"{tag}"', "X-Repo-Commit": hub.commit(repo)})

    def _body(self, hub: HubServer, name: str, data: bytes, headers: Mapping[str, str]) -> None:
        fault = hub.fault(name)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked and not fault.ignore_range else 0
        if start >= len(data) and asked:
            self._note(hub, name, start, 0)
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        body = data[start:]
        if fault.truncate:
            body = body[: len(body) // 2]
        if fault.corrupt:
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(206 if start else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with hub.lock:
            hub.active += 1
            hub.most_active = max(hub.most_active, hub.active)
        try:
            if hub.barrier is not None and len(data) >= LARGE:
                hub.barrier.wait(20)
            cut = fault.hold_at if fault.hold_at is not None else len(body)
            if fault.drop_at is not None:
                cut = int(len(body) * fault.drop_at)
            cut = min(cut, len(body))
            # Noted before the last byte is there: a test looks as soon as it has all of them.
            last = max(0, cut - 1)
            self.wfile.write(body[:last])
            self.wfile.flush()
            self._note(hub, name, start, cut)
            self.wfile.write(body[last:cut])
            self.wfile.flush()
            if fault.drop_at is not None:
                self.close_connection = True
                self.connection.shutdown(2)
            elif fault.hold_at is not None:
                hub.held.set()
                hub.release.wait(60)
                self._note(hub, name, start + cut, len(body) - cut)
                self.wfile.write(body[cut:])
        finally:
            with hub.lock:
                hub.active -= 1

    def _note(self, hub: HubServer, name: str, start: int, sent: int) -> None:
        authorised = self.headers.get("Authorization") is not None
        with hub.lock:
            hub.requests.append(Request(name, start, sent, authorised))

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
