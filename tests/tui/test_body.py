"""A reply looks the same streamed in pieces and shown at once, also past the sizes that switch."""

from __future__ import annotations

import random

from textual.app import App, ComposeResult
from textual.containers import VerticalScroll

from dflash_local.tui.body import HUGE, LARGE, Body
from dflash_local.tui.plain_text import PlainText

CODE = "\n".join(f"value_{n} = compute({n})  # [{n}]" for n in range(120))
ITEMS = "\n".join(
    f"- item **{n}** with `code` and some more words to make it long" for n in range(60)
)
DOCUMENT = f"""# Title

A paragraph with **bold**, *italic* and `code`. {"More words follow here. " * 20}

```python
{CODE}
```

1. one
2. two

   ```sh
   nested
   ```

{ITEMS}

| a | b |
|---|---|
| 1 | 2 |

> A quote.

{"A very long paragraph goes on. " * 100}

The end."""


class BodyApp(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self.body


async def screen_of(pieces: list[str]) -> str:
    app = BodyApp()
    async with app.run_test(size=(100, 400)) as pilot:
        for piece in pieces:
            await app.body.append(piece)
        await app.body.finish()
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips).rstrip()


def pieces_of(text: str, seed: int, most: int = 39) -> list[str]:
    chance, at, pieces = random.Random(seed), 0, list[str]()
    while at < len(text):
        size = chance.randint(1, most)
        pieces.append(text[at : at + size])
        at += size
    return pieces


async def test_streamed_equals_shown_at_once() -> None:
    assert len(CODE) > LARGE
    assert len(ITEMS) > LARGE
    streamed = await screen_of(pieces_of(DOCUMENT, 1, 400))
    assert "value_119 = compute(119)  # [119]" in streamed
    assert "The end." in streamed
    assert streamed == await screen_of([DOCUMENT])


async def test_a_huge_block_stays_plain_and_markdown_goes_on_behind_it() -> None:
    huge = "x = [1]\n" * (HUGE // 8 + 10)
    app = BodyApp()
    async with app.run_test(size=(100, 40)) as pilot:
        for piece in pieces_of(f"Before.\n\n```\n{huge}```\n\nAfter **this**.", 3, 3000):
            await app.body.append(piece)
        await app.body.finish()
        await pilot.pause()
        plain = "".join(part.text for part in app.body.query(PlainText))
        assert plain.count("x = [1]") > HUGE // 8 - 2 * LARGE
        assert "After this." in "\n".join(
            str(block.render()) for block in app.body.query("MarkdownParagraph")
        )


async def test_lines_stay_lines() -> None:
    verse = "Roses are red,\nviolets are *blue*.\n\n- an item\n  goes on\n\n> a quote\n> too\n"
    for pieces in ([verse], pieces_of(verse, 2, 5)):
        lines = [line.strip(" ▌•│") for line in (await screen_of(pieces)).splitlines()]
        for line in ("Roses are red,", "violets are blue.", "goes on", "too"):
            assert line in lines


async def test_an_open_fence_is_shown_to_its_end() -> None:
    text = "```python\n" + CODE
    assert "value_119" in await screen_of(pieces_of(text, 4, 400))
