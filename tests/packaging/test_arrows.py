from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def laid_out(tree: Path, tmp_path: Path) -> Path:
    """The packages' code as an install lays it out."""
    script = tree / "tests" / "packaging" / "lay_out.py"
    spec = importlib.util.spec_from_file_location("lay_out", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.lay_out(tmp_path / "imports")
    return tmp_path / "imports"


def _lint(folder: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run())"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--config", str(tree / "pyproject.toml")],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )


def test_arrows_hold(laid_out: Path, tree: Path) -> None:
    done = _lint(laid_out, tree)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("dflash_local/errors.py", "import dflash_local.backends"),
        ("dflash_local/registry.py", "from dflash_local import tui"),
        ("dflash_local/tui/__init__.py", "def late() -> None:\n    import dflash_local.backends"),
        ("dflash_local/backends/__init__.py", "import dflash_local.tui"),
        ("dflash_local/loop.py", "import torch"),
        ("dflash_local/stats.py", "from dflash_local import extra"),
    ],
)
def test_a_turned_arrow_is_noticed(laid_out: Path, tree: Path, file: str, line: str) -> None:
    (laid_out / "dflash_local" / "extra.py").write_text("import transformers\n")
    with (laid_out / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    done = _lint(laid_out, tree)
    assert done.returncode != 0
    assert "BROKEN" in done.stdout
