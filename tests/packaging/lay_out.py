"""Lays the packages' Python files out as an install does: ``lay_out.py FOLDER``.

import-linter walks folders. In the source tree ``backends/`` and ``tui/`` lie beside the package
that they install into, so it would miss them there.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TREE = Path(__file__).parents[2]


def lay_out(target: Path) -> None:
    """Replace ``target`` by the layout that pyproject.toml describes."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text(encoding="utf-8"))
    shutil.rmtree(target, ignore_errors=True)
    for package, folder in project["tool"]["setuptools"]["package-dir"].items():
        home = target.joinpath(*package.split("."))
        home.mkdir(parents=True, exist_ok=True)
        for source in (TREE / folder).glob("*.py"):
            shutil.copyfile(source, home / source.name)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
