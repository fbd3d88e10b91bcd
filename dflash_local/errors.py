"""Every error meant for a person: one line for the cause, one for the next step."""

from __future__ import annotations


class DflashError(Exception):
    """Root of all errors that a user can meet.

    Attributes:
        cause: what went wrong, one line, with the names and numbers concerned.
        next_step: what to do about it, one line; empty when nothing sensible can be said.
    """

    exit_code = 1

    def __init__(self, cause: str, next_step: str = "") -> None:
        self.cause = " ".join(cause.split())
        self.next_step = " ".join(next_step.split())
        super().__init__(self.cause, self.next_step)

    def __str__(self) -> str:
        return f"{self.cause} {self.next_step}".strip()


def how_to_install(extra: str) -> str:
    """The next step where a library of an optional part is missing."""
    return f"Run pip install 'dflash-local[{extra}]', in a clone pip install -e '.[{extra}]'."


class UnknownModel(DflashError):
    """A name that the registry does not hold and that is no folder or repo id."""


class NotDownloaded(DflashError):
    """A known model whose files are not on this machine."""


class RegistryError(DflashError):
    """models.toml does not follow its schema."""


class DownloadError(DflashError):
    """A download failed, was refused or did not verify."""


class WeightsError(DflashError):
    """Weights, configuration or tokenizer files are missing, truncated or of a refused kind."""


class DraftMismatch(DflashError):
    """The draft cannot serve this target."""


class BackendUnavailable(DflashError):
    """The backend asked for cannot run on this machine."""


class DoesNotFit(DflashError):
    """The pair needs more memory than this machine has free."""


class OptionError(DflashError):
    """An option is out of range, or the chosen path cannot honour it."""

    exit_code = 2


class ContextFull(DflashError):
    """The prompt leaves no room in the context for an answer."""


class EngineError(DflashError):
    """The engine broke off: a failed round, out of memory, a closed engine."""


def explained(
    error: BaseException, *, when: str = "", what: str = "The engine broke off", next_step: str = ""
) -> DflashError:
    """An error of a library in our own words; the cause stays attached.

    Args:
        error: whatever was raised; a ``DflashError`` is given back as it is.
        when: what is said behind "Out of memory".
        what: what is said of everything else, before the library's words.
        next_step: likewise, behind them.
    """
    if isinstance(error, DflashError):
        return error
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        told = EngineError(
            f"Out of memory{when}.",
            "Use a smaller context, a smaller model or stronger quantisation.",
        )
    else:
        end = "." if next_step else ""
        told = EngineError(f"{what}: {type(error).__name__}: {error}{end}", next_step)
    told.__cause__ = error
    return told
