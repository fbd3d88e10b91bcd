"""Messages that threads and widgets post to the chat screen."""

from __future__ import annotations

from textual.message import Message

from dflash_local.backend import BackendInfo, MemoryFigures
from dflash_local.errors import DflashError
from dflash_local.events import LoadProgress


class LoadStep(Message):
    """The load got further."""

    def __init__(self, progress: LoadProgress) -> None:
        super().__init__()
        self.progress = progress


class Loaded(Message):
    """The pair is ready."""

    def __init__(self, info: BackendInfo, seconds: float) -> None:
        super().__init__()
        self.info = info
        self.seconds = seconds


class LoadFailed(Message):
    """The pair could not be loaded."""

    def __init__(self, error: DflashError) -> None:
        super().__init__()
        self.error = error


class PlainSpeed(Message):
    """Plain decoding was timed on this machine."""

    def __init__(self, tok_s: float, *, estimated: bool = True) -> None:
        super().__init__()
        self.tok_s = tok_s
        self.estimated = estimated


class MemoryRead(Message):
    """What the engine holds."""

    def __init__(self, memory: MemoryFigures) -> None:
        super().__init__()
        self.memory = memory
