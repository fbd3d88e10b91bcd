from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="session")
def tree() -> Path:
    """The top of the source tree."""
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def project(tree: Path) -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
