"""Dialog: a screen over the chat that closes once, whatever asks for it and how often."""

from __future__ import annotations

from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen, ScreenResultType


class Dialog(ModalScreen[ScreenResultType]):
    """Base of every screen over the chat.

    Two keys, or a key and the end of a download, may both ask for the close before the first is
    done; closing again would take the next screen away, or the last one.
    """

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        """Close with a result, and with it what lies over it; nothing where it is closed."""
        if self not in self.app.screen_stack:
            return AwaitComplete()
        while self.app.screen is not self:
            self.app.pop_screen()
        closing: AwaitComplete = super().dismiss(result)
        return closing
