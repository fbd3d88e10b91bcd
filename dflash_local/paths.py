"""The only place that knows directories: cache, configuration, saved chats, logs."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from dflash_local.errors import OptionError

_APP = "dflash-local"


def _folder(variable: str, default: str) -> Path:
    """A folder from an environment variable, else the platform's own."""
    return expanded(os.environ.get(variable) or default, variable)


def expanded(place: str | Path, name: str) -> Path:
    """A path whose ``~`` is spelled out.

    Args:
        place: what was given.
        name: the variable, option or command that gave it.

    Raises:
        OptionError: it begins with the home folder of a user whose home is not known.
    """
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise OptionError(
            f"{name}: {place} begins with a home folder that is not known.",
            f"Give {name} a whole path.",
        ) from error


def existing_folder(place: str | Path) -> Path | None:
    """The folder that a text names; None where it names none, or nothing that can be one."""
    try:
        folder = Path(place).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, an unknown ~user, a NUL
        return None


def cache_dir() -> Path:
    """Converted models and measured tables; safe to delete. ``DFLASH_CACHE`` moves it."""
    return _folder("DFLASH_CACHE", platformdirs.user_cache_dir(_APP, appauthor=False))


def config_dir() -> Path:
    """The user's models.toml and settings. ``DFLASH_CONFIG`` moves it."""
    return _folder("DFLASH_CONFIG", platformdirs.user_config_dir(_APP, appauthor=False))


def data_dir() -> Path:
    """Saved chats and prompt history. ``DFLASH_DATA`` moves it."""
    return _folder("DFLASH_DATA", platformdirs.user_data_dir(_APP, appauthor=False))


def log_dir() -> Path:
    """Log files of engine processes. ``DFLASH_LOG`` moves it."""
    return _folder("DFLASH_LOG", platformdirs.user_log_dir(_APP, appauthor=False))


def hub_cache_dir() -> Path:
    """The Hugging Face cache, shared with other tools; its own variables move it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if explicit := os.environ.get(name):
            return expanded(os.path.expandvars(explicit), name)
    home = os.environ.get("HF_HOME")
    if home is None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = str(Path(base) / "huggingface")
    return expanded(os.path.expandvars(home), "HF_HOME") / "hub"


def lm_studio_dirs() -> tuple[Path, ...]:
    """Where LM Studio keeps models as ``publisher/name``, in its new and its old place."""
    try:
        home = Path.home()
    except RuntimeError:  # an account without one
        return ()
    return (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models")
