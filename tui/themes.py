"""Themes: light or dark as the terminal is, until the user chooses one."""

from __future__ import annotations

from collections.abc import Mapping

from textual.constants import DEFAULT_THEME

_LIGHT_BACKGROUNDS = ("7", *(str(number) for number in range(9, 16)))
"""Of the sixteen colours; 8 is a dark grey."""


def of_terminal(environment: Mapping[str, str]) -> str:
    """Name of the theme for this terminal.

    Textual does not ask the terminal for its background, so this rests on ``COLORFGBG``, which
    some terminals set; the others get the default.
    """
    background = environment.get("COLORFGBG", "").rpartition(";")[2]
    if "TEXTUAL_THEME" not in environment and background in _LIGHT_BACKGROUNDS:
        return "textual-light"
    return DEFAULT_THEME
