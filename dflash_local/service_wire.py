"""What passes between the app and its engine process: frames of pickled values over two pipes.

Both ends are the same program of the same user, so pickle is safe here; nothing else may write
to these pipes.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from dflash_local.backend import BackendInfo
from dflash_local.engine import Opened
from dflash_local.errors import DflashError
from dflash_local.events import Event, LoadProgress
from dflash_local.prompting import Message, Prompt
from dflash_local.sampling import SamplingParams

_HEADER = struct.Struct("<Q")
LOAD = 0
"""The request number of the load itself."""


class ServiceOpener(Protocol):
    """Loads a pair and reports how far it is; must pickle, runs in the engine process."""

    def __call__(self, progress: Callable[[LoadProgress], None], /) -> Opened:
        """Backend and tokenizer."""
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """The first frame: what to load."""

    opener: ServiceOpener


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for an answer; the fields are the arguments of ``Engine.stream``."""

    number: int
    messages: tuple[Message, ...] | tuple[int, ...] | str | Prompt
    sampling: SamplingParams | None
    block: int | None
    thinking: bool | None
    reuse: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """End answer ``number`` after its current round, if it runs or waits."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the engine to call, in turn with the answers."""

    number: int
    method: str
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """Stop, give the memory back, end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The pair is loaded."""

    info: BackendInfo


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one request, in order."""

    number: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """What a ``Call`` gave."""

    number: int
    value: object


@dataclass(frozen=True, slots=True)
class Failed:
    """A request, a call or the load (number 0) raised."""

    number: int
    error: DflashError


Request = Start | Ask | Stop | Call | Close
Response = Ready | Batch | Returned | Failed


def write(pipe: BinaryIO, frame: Request | Response) -> None:
    """Write one frame and flush."""
    body = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_HEADER.pack(len(body)) + body)
    pipe.flush()


def read(pipe: BinaryIO) -> Request | Response:
    """The next frame.

    Raises:
        EOFError: the other end is gone.
    """
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    (size,) = _HEADER.unpack(header)
    body = pipe.read(size)
    if len(body) < size:
        raise EOFError
    frame: Request | Response = pickle.loads(body)  # noqa: S301 - written by ourselves
    return frame
