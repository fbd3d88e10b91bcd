"""No model yet: choose one, download it with a cancel and a second try, load it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflash_local.backends.scripted_chat import ScriptedOpener
from dflash_local.errors import NotDownloaded
from dflash_local.service_wire import ServiceOpener
from dflash_local.tui import pull_dialog
from dflash_local.tui.dialogs import ChooseDialog
from dflash_local.tui.pull_dialog import PullDialog
from tests.tui.driver import Driver, chat

PULL = """
import sys, time, pathlib
state = pathlib.Path({state!r})
tries = int(state.read_text()) if state.exists() else 0
state.write_text(str(tries + 1))
print("Downloading: 40 of 100 MB", file=sys.stderr, flush=True)
if tries == {slow}:
    time.sleep(60)
if tries < 1:
    sys.exit("dflash-local: The server went away.")
print("Downloading: 100 of 100 MB", file=sys.stderr, flush=True)
"""


class Shop:
    """Pairs that are here once their download ended well."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "tries"

    def open(self, name: str) -> ServiceOpener:
        if not self.state.exists() or int(self.state.read_text()) < 2:
            raise NotDownloaded(f"{name} is not on this machine.", "Pull it.")
        opener: ServiceOpener = ScriptedOpener((f"I am {name}.",))
        return opener


async def choose_demo(driver: Driver, shop: Shop) -> PullDialog:
    driver.screen.openers = shop.open
    await driver.screen.load.failed(NotDownloaded("The demo is not here.", "Pull it."))
    await driver.until(lambda: isinstance(driver.app.screen, ChooseDialog))
    assert "demo" in driver.words()
    await driver.pilot.press("enter")
    await driver.until(lambda: isinstance(driver.app.screen, PullDialog))
    dialog = driver.app.screen
    assert isinstance(dialog, PullDialog)
    return dialog


async def test_choose_fail_try_again_and_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(tmp_path)
    script = PULL.format(state=str(shop.state), slow=-1)
    monkeypatch.setattr(pull_dialog, "command", lambda name: [sys.executable, "-c", script])
    async with chat() as driver:
        await choose_demo(driver, shop)
        await driver.until(lambda: "The server went away." in driver.words())
        await driver.pilot.press("enter")
        await driver.until(lambda: driver.app.screen is driver.screen)
        await driver.until(lambda: driver.screen.pair == "demo")
        await driver.ready()
        await driver.say("who are you?")
        assert "I am demo." in driver.words()


async def test_cancel_ends_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(tmp_path)
    script = PULL.format(state=str(shop.state), slow=0)
    monkeypatch.setattr(pull_dialog, "command", lambda name: [sys.executable, "-c", script])
    async with chat() as driver:
        dialog = await choose_demo(driver, shop)
        await driver.until(lambda: "40 of 100 MB" in driver.words())
        process = dialog._process
        assert process is not None
        await driver.pilot.press("escape")
        await driver.until(lambda: process.poll() is not None)
        assert driver.app.screen is driver.screen


async def test_a_large_download_is_asked_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(tmp_path)
    script = PULL.format(state=str(shop.state), slow=-1)
    monkeypatch.setattr(pull_dialog, "command", lambda name: [sys.executable, "-c", script])
    async with chat() as driver:
        driver.screen.openers = shop.open
        for again in (False, True):
            await driver.send("/pull qwen3-4b")
            await driver.until(
                lambda: "Download qwen3-4b (its size is not known)?" in driver.words()
            )
            assert not shop.state.exists()
            await driver.pilot.press("enter" if again else "escape")
            await driver.pilot.pause()
        await driver.until(lambda: "The server went away." in driver.words())
        assert "Downloading qwen3-4b" in driver.words()


@pytest.mark.parametrize("size", [(80, 24), (44, 14)])
async def test_the_models_and_their_keys_fit_on_the_screen(size: tuple[int, int]) -> None:
    async with chat(size=size) as driver:
        await driver.send("/model")
        await driver.until(lambda: isinstance(driver.app.screen, ChooseDialog))
        await driver.pilot.pause()
        for words in ("Models", "demo", "Enter chooses", "Esc closes"):
            assert words in driver.shown()
        assert driver.shown().count("╰") == driver.shown().count("╭") == 1


async def test_no_color_and_ascii_and_ansi(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local.tui.app import Options

    monkeypatch.setenv("NO_COLOR", "1")
    opener = ScriptedOpener(("Hello. " * 20,), round_ms=2)
    async with chat(opener, options=Options(ascii=True)) as driver:
        await driver.send("/theme ansi-dark")
        await driver.say("hi")
        await driver.pilot.press("ctrl+s", "ctrl+s")
        await driver.pilot.pause()
        assert "tau" in driver.shown().splitlines()[-1]
        for sign in "τ×█▁":
            assert sign not in driver.shown()
