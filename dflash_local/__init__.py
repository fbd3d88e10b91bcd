"""dflash-local: fast local chat with DFlash drafts on MLX and PyTorch.

``load`` opens a pair, ``Engine.stream`` answers. Importing this package loads no framework;
names resolve on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_local.aio import acomplete, astream
    from dflash_local.chat import Answer, Chat, ChatOptions, Conversation
    from dflash_local.engine import Engine
    from dflash_local.errors import (
        BackendUnavailable,
        ContextFull,
        DflashError,
        DoesNotFit,
        DownloadError,
        DraftMismatch,
        EngineError,
        NotDownloaded,
        OptionError,
        RegistryError,
        UnknownModel,
        WeightsError,
    )
    from dflash_local.events import Done, Event, LoadProgress, Piece, Prefill, Round, Text, Usage
    from dflash_local.prompting import Message
    from dflash_local.reply import Reply
    from dflash_local.sampling import SamplingParams
    from dflash_local.select import load
    from dflash_local.stats import DraftStats, StatsSummary

__version__ = "0.1.0"

_HOMES = {
    "load": "select",
    "Engine": "engine",
    "Reply": "reply",
    "Message": "prompting",
    **dict.fromkeys(("acomplete", "astream"), "aio"),
    **dict.fromkeys(("Answer", "Chat", "ChatOptions", "Conversation"), "chat"),
    **dict.fromkeys(
        (
            *("BackendUnavailable", "ContextFull", "DflashError", "DoesNotFit", "DownloadError"),
            *("DraftMismatch", "EngineError", "NotDownloaded", "OptionError", "RegistryError"),
            *("UnknownModel", "WeightsError"),
        ),
        "errors",
    ),
    **dict.fromkeys(
        ("Done", "Event", "LoadProgress", "Piece", "Prefill", "Round", "Text", "Usage"), "events"
    ),
    "SamplingParams": "sampling",
    **dict.fromkeys(("DraftStats", "StatsSummary"), "stats"),
}

__all__ = [
    "Answer",
    "BackendUnavailable",
    "Chat",
    "ChatOptions",
    "ContextFull",
    "Conversation",
    "DflashError",
    "DoesNotFit",
    "Done",
    "DownloadError",
    "DraftMismatch",
    "DraftStats",
    "Engine",
    "EngineError",
    "Event",
    "LoadProgress",
    "Message",
    "NotDownloaded",
    "OptionError",
    "Piece",
    "Prefill",
    "RegistryError",
    "Reply",
    "Round",
    "SamplingParams",
    "StatsSummary",
    "Text",
    "UnknownModel",
    "Usage",
    "WeightsError",
    "__version__",
    "acomplete",
    "astream",
    "load",
]


def __getattr__(name: str) -> object:
    """Import a public name's module when the name is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
