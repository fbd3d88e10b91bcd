"""Text that may come from anywhere, made safe to put on a screen.

Control characters become visible signs, so a reply cannot move the cursor, ring, or turn the
line's direction. Copies and saved chats keep the original.
"""

from __future__ import annotations

_SIGNS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n\r"},
    ord("\r"): "",
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),
    # Line breaks that Python splits at and Markdown does not: a mismatch would lose text.
    0x2028: " ",
    0x2029: " ",
    # Characters that turn the direction of the rest of the line.
    **{code: f"<U+{code:04X}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    # Halves of a character pair cannot be written to a terminal.
    **dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}"),
}


def visible(text: str) -> str:
    """``text`` with every character that a terminal would act on replaced by a sign."""
    return text if text.isascii() and text.isprintable() else text.translate(_SIGNS)


def one_line(text: str, limit: int) -> str:
    """The visible start of ``text`` on one line, at most ``limit`` characters."""
    line = " ".join(visible(text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: max(0, limit - 1)] + "…"
