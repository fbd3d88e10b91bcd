"""Settings: what the user chose and the app remembers; one JSON file in the config folder."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from dflash_local.errors import DflashError
from dflash_local.paths import config_dir
from dflash_local.whole_file import write_whole


class SettingsError(DflashError):
    """chat.json holds something else than settings."""


@dataclass(slots=True)
class Settings:
    """Values of chat.json; absent ones have these defaults."""

    theme: str = ""
    """Name of a theme; empty takes the app's own."""
    enter_sends: bool = True
    """False swaps: Enter is a new line, Shift+Enter and Ctrl+J send."""
    esc_twice: bool = False
    """Whether stopping takes Esc twice."""
    panel: str = "off"
    """The stats panel: ``off``, ``compact`` or ``full``."""
    keymap: dict[str, str] = field(default_factory=dict)
    """Keys by action id, for example ``{"reply.retry": "f5"}``; the help lists the ids."""

    def save(self) -> None:
        """Write the file; a folder that cannot be written costs only the memory of it."""
        with suppress(OSError):
            write_whole(settings_file(), json.dumps(asdict(self), indent=2) + "\n")


def settings_file() -> Path:
    """Where settings are kept."""
    return config_dir() / "chat.json"


def load_settings() -> Settings:
    """The user's settings.

    Raises:
        SettingsError: the file is damaged or holds a wrong type.
    """
    path = settings_file()
    if not path.is_file():
        return Settings()
    settings = Settings()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {item.name: type(getattr(settings, item.name)) for item in fields(settings)}
        for name, value in values.items():
            if name in known and not isinstance(value, known[name]):
                raise TypeError(f"{name} is {value!r}")
            if name in known:
                setattr(settings, name, value)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SettingsError(f"{path} is damaged: {error}.", "Correct or delete it.") from error
    return settings
