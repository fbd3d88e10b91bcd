"""Offer: what choosing a pair would mean on this machine: a target, a download, whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local import registry
from dflash_local.cli_pull import choose_target
from dflash_local.errors import OptionError
from dflash_local.pairs import Pair

from . import figures
from .machine import fits, space_here

ASKED = 1_000_000_000
"""Bytes above which a download is asked about first."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One pair, with the target that this machine's backend would load."""

    pair: Pair
    possible: bool
    """Whether there is a target for this machine's backend."""
    here: bool = False
    """Nothing has to be downloaded."""
    download: int = 0
    """Bytes to fetch; 0 where that is not known, or nothing."""
    fits: bool = True

    @property
    def size(self) -> str:
        """The download's size in words."""
        return figures.gigabytes(self.download) if self.download else "size unknown"

    @property
    def question(self) -> str:
        """What to ask before the download; empty where it is small."""
        if self.here or 0 < self.download <= ASKED:
            return ""
        size = self.size if self.download else "its size is not known"
        large = "" if self.fits else " It is too large for this machine."
        return f"Download {self.pair.name} ({size})?{large}"

    @property
    def line(self) -> str:
        """Name, state, fit and title."""
        state = "on disk" if self.here else f"download, {self.size}"
        if not self.possible:
            state = "not for this machine"
        elif not self.fits:
            state = f"{state}, too large here"
        return f"{self.pair.name:<24} {state:<22}  {self.pair.title}"


def offer(pair: Pair) -> Offer:
    """What this machine could do with a pair."""
    try:
        target = choose_target(pair)
    except OptionError:
        return Offer(pair, possible=False)
    missing = [files for files in (target, pair.draft) if registry.files_dir(files) is None]
    known = all(files.approx_bytes for files in missing)
    return Offer(
        pair,
        possible=True,
        here=not missing,
        download=sum(files.approx_bytes for files in missing) if known else 0,
        fits=fits(pair, target, space_here()),
    )
