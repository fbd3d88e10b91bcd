"""Asks the Hugging Face hub what a repository holds, and says in our terms why it would not answer.

Listing, log-in and metadata go through huggingface_hub; it is imported only when a request is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlsplit

from dflash_local.errors import DownloadError
from dflash_local.transfer import Client, Patience, Refused, RemoteFile, http_errors, retry_after

DEFAULT_ENDPOINT = "https://huggingface.co"
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

_NAMES = ("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one repository that are worth fetching, at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def offline() -> bool:
    """Whether the environment forbids requests."""
    on = {"1", "ON", "YES", "TRUE"}
    return any(os.environ.get(name, "").upper() in on for name in OFFLINE_VARIABLES)


def endpoint() -> str:
    """The hub or its mirror: ``HF_ENDPOINT``.

    Raises:
        DownloadError: that is no address of a server.
    """
    address = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    try:
        parts = urlsplit(address)
        host = (parts.hostname or "").encode("idna")  # as it is looked up
        usable = bool(host) and parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not address.isprintable() or " " in address:
        raise DownloadError(
            f"HF_ENDPOINT is {_without_login(address)!r}, which is no address of a server.",
            "Give it as https://HOST, or unset it.",
        )
    return address.rstrip("/")


def shown_endpoint() -> str:
    """The same for people: without a name and password that may stand in it."""
    return _without_login(endpoint())


def _without_login(address: str) -> str:
    before, at, host = address.rpartition("@")
    return f"{before.partition('//')[0]}//{host}" if at else address


def page(repo: str) -> str:
    """Where a person reads about a repository."""
    return f"{shown_endpoint()}/{repo}"


def list_files(repo: str, revision: str, patience: Patience) -> Listing:
    """What a repository holds at a revision; an empty one means its main branch.

    Raises:
        DownloadError: offline, unreachable, refused, unknown, or nothing in it can be loaded.
    """
    if offline():
        raise DownloadError(
            f"{repo} is not complete on this machine and {OFFLINE_VARIABLES[0]} forbids requests.",
            "Unset it and run again, or copy the model's folder from another machine.",
        )
    session()
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    api = HfApi(endpoint=endpoint(), library_name="dflash-local")

    def ask() -> Any:
        return api.model_info(
            repo, revision=revision or None, files_metadata=True, timeout=patience.timeout
        )

    info = _patiently(ask, repo, revision, patience)
    siblings = {entry.rfilename: entry for entry in info.siblings or ()}
    files = []
    for name in wanted(tuple(siblings)):
        entry = siblings[name]
        url = f"{endpoint()}/{repo}/resolve/{info.sha}/{quote(name)}"
        etag = entry.lfs.sha256 if entry.lfs else entry.blob_id
        size = entry.lfs.size if entry.lfs else entry.size
        if etag is None or size is None:
            etag, size = _ask_file(url, patience)
        if etag is None or size is None:
            raise DownloadError(
                f"{shown_endpoint()} does not say size and checksum of {repo}/{name}.",
                "Use a mirror that does, or unset HF_ENDPOINT.",
            )
        files.append(RemoteFile(name, url, int(size), etag))
    if not any(file.name.endswith(".safetensors") for file in files):
        others = sorted({name.rsplit(".", 1)[-1] for name in siblings if "." in name})
        raise DownloadError(
            f"{repo} holds no safetensors weights (only {', '.join(others) or 'nothing'}).",
            "Choose a repository with safetensors; .bin, .gguf and code are never fetched.",
        )
    return Listing(repo, str(info.sha), tuple(files))


def read_config(repo: str, patience: Patience) -> dict[str, Any]:
    """A repository's config.json on its main branch; nothing is kept on the disk.

    Raises:
        DownloadError: it cannot be had, or is no JSON object.
    """
    client, headers = session()
    url = f"{endpoint()}/{repo}/resolve/main/config.json"
    asked = {**headers, "Accept-Encoding": "identity"}
    try:
        with client.stream("GET", url, headers=asked, timeout=patience.timeout) as response:
            status, body = response.status_code, b"".join(response.iter_raw())
    except Exception as error:
        if not isinstance(error, (*http_errors(), OSError)):
            raise
        raise _unreachable(error) from error
    if status != 200:
        raise refusal(repo, status)
    try:
        config = json.loads(body)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise DownloadError(f"The config.json of {repo} is no JSON object.", f"See {page(repo)}.")
    return config


def wanted(names: Sequence[str]) -> list[str]:
    """Of a repository's files those that loading needs: weights, JSON, tokenizer, template.

    Only the top folder counts, and where the usual ``model*.safetensors`` exist, copies of the
    weights under other names are left out.
    """
    usual = any(n.startswith("model") and n.endswith(".safetensors") for n in names)
    chosen = []
    for name in sorted(names):
        if "/" in name or "\\" in name or name.startswith("."):
            continue
        if name.endswith(".safetensors"):
            if not usual or name.startswith("model"):
                chosen.append(name)
        elif name.endswith(".index.json"):
            if name.endswith(".safetensors.index.json"):
                chosen.append(name)
        elif name.endswith((".json", ".tiktoken", ".jinja")) or name in _NAMES:
            chosen.append(name)
    return chosen


def session() -> tuple[Client, dict[str, str]]:
    """The shared HTTP client, which knows proxies and certificates, and the headers with the token.

    huggingface_hub's own client is used, so whatever it is set to do holds here too.

    Raises:
        DownloadError: HF_ENDPOINT or a proxy is no address.
    """
    endpoint()  # before huggingface_hub reads it, who takes any text for an address
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = build_hf_headers(library_name="dflash-local")
    unusable: tuple[type[Exception], ...] = (*http_errors(), ValueError, ImportError)
    try:
        client = cast(Client, get_session())
    except unusable as error:
        raise DownloadError(
            f"The proxy cannot be used: {str(error).rstrip('.')}.",
            "Correct or unset HTTPS_PROXY and ALL_PROXY.",
        ) from error
    return client, {str(k): str(v) for k, v in headers.items()}


def refusal(repo: str, status: int, code: str = "", revision: str = "") -> DownloadError:
    """Why the hub hands out nothing, and what a person can do about it."""
    if code == "RevisionNotFound":
        return DownloadError(
            f"{repo} has no revision {revision}.",
            f"See {page(repo)}/commits/main for those it has.",
        )
    if code == "GatedRepo" or status == 403:
        return DownloadError(
            f"{repo} is gated: its terms must be accepted before it can be downloaded.",
            f"Accept them on {page(repo)}, log in with: hf auth login (or set HF_TOKEN), and run "
            "the same command again.",
        )
    if status == 401:
        return DownloadError(
            f"The hub does not show {repo} to you: it does not exist, or it is private.",
            f"Check the spelling at {page(repo)}; for a private one log in with: hf auth login.",
        )
    if status == 404:
        return DownloadError(
            f"There is no {repo} on {shown_endpoint()}.", "Check the spelling of the repository."
        )
    return DownloadError(f"The hub answered {status} for {repo}.", "Try again later.")


def _ask_file(url: str, patience: Patience) -> tuple[str | None, int | None]:
    """Checksum and size of a file that the listing leaves open, by a request for its headers."""
    from huggingface_hub import get_hf_file_metadata

    with contextlib.suppress(*http_errors(), OSError):
        about = get_hf_file_metadata(url, timeout=patience.timeout, library_name="dflash-local")
        return about.etag, about.size
    return None, None


def _patiently(ask: Callable[[], _T], repo: str, revision: str, patience: Patience) -> _T:
    """Ask, and ask again where the hub wants time or the connection dropped."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    delay = patience.first_delay
    for attempt in range(1, patience.attempts + 1):
        try:
            return ask()
        except HFValidationError as error:
            raise DownloadError(f"{repo!r} is no repository id.", "Give it as org/name.") from error
        except HfHubHTTPError as error:
            answer = getattr(error, "response", None)
            status = getattr(answer, "status_code", 0)
            headers: Mapping[str, str] = getattr(answer, "headers", {})
            pause = retry_after(headers)
            again = status == 429 or status >= 500
            if not again or attempt == patience.attempts or (pause or 0) > patience.longest_wait:
                if status == 429:
                    when = f" and asks to wait {pause:.0f} s" if pause else ""
                    raise DownloadError(
                        f"The hub limits requests from here{when}.",
                        "Run the same command again later; hf auth login raises the limit.",
                    ) from error
                raise refusal(repo, status, headers.get("X-Error-Code", ""), revision) from error
            time.sleep(delay if pause is None else pause)
        except Exception as error:
            if not isinstance(error, (*http_errors(), OSError)):
                raise
            if attempt == min(3, patience.attempts):
                raise _unreachable(error) from error
            time.sleep(delay)
        delay = min(2 * delay, patience.longest_delay)
    raise AssertionError("unreachable")


def _unreachable(error: Exception) -> DownloadError:
    """No answer at all."""
    return DownloadError(
        f"{shown_endpoint()} could not be reached: {error}.",
        "Check the connection (HTTPS_PROXY where there is a proxy), then run the same command "
        "again.",
    )


def explain_refusal(repo: str, refused: Refused) -> DownloadError:
    """A refused file as an error for a person."""
    return refusal(repo, refused.status, refused.code)
