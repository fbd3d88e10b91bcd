"""Build step that carries models.toml, which lives at the top of the tree, into the wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

_REGISTRY = "models.toml"


class BuildPy(build_py):  # type: ignore[misc]
    """The stock ``build_py`` plus one copied file."""

    def run(self) -> None:
        """Copy the registry beside the package, unless the install is editable."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "dflash_local"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_REGISTRY, folder / _REGISTRY)

    def get_source_files(self) -> list[str]:
        """Name the registry as a source, so that an sdist carries it."""
        return [*super().get_source_files(), _REGISTRY]
