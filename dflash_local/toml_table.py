"""Typed reads from a parsed TOML document; every complaint names file, line and key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from dflash_local.errors import RegistryError


class TomlTable:
    """Typed reads from one TOML table; complains with file, line and key."""

    def __init__(
        self, values: Mapping[str, object], path: tuple[str | int, ...], file: str, text: str
    ) -> None:
        self._values = values
        self._path = path
        self._file = file
        self._text = text
        self._known: set[str] = set()

    def error(self, key: str, problem: str) -> RegistryError:
        """``FILE:LINE: KEY PROBLEM``; an empty key means the table itself."""
        path = (*self._path, key) if key else self._path
        name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        line = line_of(self._text, path)
        return RegistryError(
            f"{self._file}:{line}: {name} {problem}.", "Correct the file and run again."
        )

    def _get(self, key: str, *, required: bool) -> object:
        self._known.add(key)
        if required and key not in self._values:
            raise self.error(key, "is missing")
        return self._values.get(key)

    def text(self, key: str, default: str | None = None, choices: tuple[str, ...] = ()) -> str:
        """A string; required unless there is a default."""
        value = self._get(key, required=default is None)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (not value and default is None):
            raise self.error(key, f"must be a text, not {value!r}")
        if choices and value not in choices:
            raise self.error(key, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def texts(self, key: str, choices: tuple[str, ...] = ()) -> tuple[str, ...]:
        """A list of strings, empty when absent."""
        value = self._get(key, required=False)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"must be a list of texts, not {value!r}")
        for item in value:
            if choices and item not in choices:
                raise self.error(key, f"may hold {', '.join(choices)}, not {item!r}")
        return tuple(value)

    def whole(self, key: str, default: int | None = None, *, low: int) -> int:
        """An integer of at least ``low``; required unless there is a default."""
        value = self._get(key, required=default is None)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.error(key, f"must be a whole number of at least {low}, not {value!r}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false; required unless there is a default."""
        value = self._get(key, required=default is None)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def table(self, key: str) -> TomlTable:
        """A table inside this one."""
        return self._child(self._get(key, required=True), key)

    def optional_table(self, key: str) -> TomlTable | None:
        """A table inside this one, None when absent."""
        value = self._get(key, required=False)
        return None if value is None else self._child(value, key)

    def tables(self, key: str) -> Iterator[tuple[str, TomlTable]]:
        """The named tables inside a table; none when absent."""
        value = self._get(key, required=False)
        if value is None:
            return
        outer = self._child(value, key)
        for name, inner in outer._values.items():
            yield name, outer._child(inner, name)

    def list_of_tables(self, key: str) -> Iterator[TomlTable]:
        """A list of at least one table."""
        value = self._get(key, required=True)
        if not isinstance(value, list) or not value:
            raise self.error(key, f"must be a list of tables, written as [[...{key}]]")
        for number, inner in enumerate(value):
            yield self._child(inner, key, number)

    def _child(self, value: object, *steps: str | int) -> TomlTable:
        path = (*self._path, *steps)
        if not isinstance(value, dict):
            raise TomlTable({}, path, self._file, self._text).error("", "must be a table")
        return TomlTable(value, path, self._file, self._text)

    def finish(self) -> None:
        """Refuse keys that nobody asked for."""
        for key in self._values:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise self.error(key, f"is not a known key{hint}")


_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


def line_of(text: str, path: tuple[str | int, ...]) -> int:
    """The line that defines ``path``, or the nearest table around it; TOML parsers do not say."""
    here: tuple[str | int, ...] = ()
    lists: dict[tuple[str | int, ...], int] = {}
    best_line, best_depth = 1, 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            here = tuple(part.strip("\"'") for part in _PART.findall(header[2]))
            if header[1] == "[[":
                lists[here] = lists.get(here, -1) + 1
                here = (*here, lists[here])
            found = here
        elif key := _KEY.match(line):
            found = (*here, *(part.strip("\"'") for part in _PART.findall(key[1])))
        else:
            continue
        if len(found) > best_depth and path[: len(found)] == found:
            best_line, best_depth = number, len(found)
    return best_line
