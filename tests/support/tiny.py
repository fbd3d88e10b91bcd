"""Tiny pairs in the format of published checkpoints, laid out in a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.kits import DATA

LOOP = DATA / "loop"


def loop_pair(
    folder: Path,
    target_override: Mapping[str, Any] | None = None,
    draft_override: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """The tiny Qwen3 target and the draft fitted to it; overrides replace config keys."""
    paths = []
    for name, override in (("target", target_override), ("draft", draft_override)):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(LOOP / f"{name}.safetensors", place / "model.safetensors")
        config = json.loads((LOOP / f"{name}_config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, **(override or {})}))
        paths.append(place)
    return paths[0], paths[1]
