"""Every test gets folders of its own and one thread of arithmetic."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job begins deaf to Ctrl+C, and so would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from the user's cache, settings, chats and logs."""
    for name in ("CONFIG", "DATA", "LOG"):
        monkeypatch.setenv(f"DFLASH_{name}", str(tmp_path / "home" / name.lower()))
