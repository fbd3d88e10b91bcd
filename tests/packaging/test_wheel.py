from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

SKIPPED = {".venv", "build", "dist", "tests", "docs"}


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that pip builds from the files of the tree, without any download."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    _copy_tree(tree, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(place), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return zipfile.ZipFile(next(place.glob("*.whl")))


def _copy_tree(tree: Path, target: Path) -> None:
    """Only what a clone would hold of the top level, so that old build folders play no part."""
    target.mkdir()
    for path in tree.iterdir():
        if path.is_file():
            shutil.copyfile(path, target / path.name)
        elif path.name not in SKIPPED and not path.name.startswith(".") and "egg" not in path.name:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, target / path.name, ignore=ignored)


def test_package_list_equals_the_tree(tree: Path, project: dict[str, Any]) -> None:
    setuptools = project["tool"]["setuptools"]
    folders = {
        init.parent.relative_to(tree).as_posix()
        for init in tree.rglob("__init__.py")
        if not SKIPPED & set(init.relative_to(tree).parts)
    }
    assert set(setuptools["package-dir"].values()) == folders
    assert sorted(setuptools["package-dir"]) == sorted(setuptools["packages"])


def test_wheel_holds_code_and_data(wheel: zipfile.ZipFile, tree: Path) -> None:
    names = set(wheel.namelist())
    wanted = {
        f"{package}/{path.name}"
        for package, folder in (
            ("dflash_local", "dflash_local"),
            ("dflash_local/backends", "backends"),
            ("dflash_local/tui", "tui"),
        )
        for pattern in ("*.py", "*.tcss", "py.typed")
        for path in (tree / folder).glob(pattern)
    }
    draft = tree / "dflash_local" / "demo_draft"
    wanted |= {f"dflash_local/demo_draft/{path.name}" for path in draft.iterdir()}
    wanted |= {"dflash_local/models.toml", "dflash_local/py.typed"}
    assert wanted <= names, wanted - names
    assert not [name for name in names if name.startswith(("backends/", "tui/", "tests/"))]
    assert wheel.read("dflash_local/models.toml") == (tree / "models.toml").read_bytes()


def test_wheel_names_licence_and_scripts(wheel: zipfile.ZipFile) -> None:
    info = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")).split("/")[0]
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: MIT" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    scripts = wheel.read(f"{info}/entry_points.txt").decode()
    assert "dflash-local = dflash_local.start:main" in scripts
    assert "dflash-chat = dflash_local.start:chat" in scripts


def test_wheel_reads_its_own_registry(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    code = (
        "from dflash_local import registry\n"
        "print(registry.packaged_file(), registry.find('demo').block)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "site",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "site" / "dflash_local" / "models.toml"), "8"]


def test_every_dependency_is_pinned(tree: Path, project: dict[str, Any]) -> None:
    text = (tree / "constraints.txt").read_text(encoding="utf-8")
    pins = {_normal(name) for name in re.findall(r"(?m)^([\w.-]+)==", text)}
    extras = project["project"]["optional-dependencies"].values()
    asked = [*project["project"]["dependencies"], *(item for extra in extras for item in extra)]
    names = {_normal(re.split(r"[\[<>=;!~ ]", item)[0]) for item in asked}
    assert names - pins == set()


def _normal(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
