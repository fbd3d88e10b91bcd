from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "mlx", "mlx_lm", "transformers", "textual", "numpy", "huggingface_hub", "rich"]
LIGHT_MODULES = ["dflash_local", "dflash_local.registry", "dflash_local.cli"]
LIMIT_SECONDS = 0.3
"""Of processor time: what else the machine does is not the import's fault."""

PROBE = """
import json, sys, time
start = time.process_time()
__import__({module!r})
spent = time.process_time() - start
print(json.dumps([spent, sorted(m for m in {heavy!r} if m in sys.modules)]))
"""


def _probe(module: str) -> tuple[float, list[str]]:
    code = PROBE.format(module=module, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    spent, loaded = json.loads(done.stdout)
    return spent, loaded


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_loads_nothing_heavy_and_is_quick(module: str) -> None:
    best = 9.9
    for _ in range(5):
        spent, loaded = _probe(module)
        assert loaded == []
        best = min(best, spent)
        if best < LIMIT_SECONDS:
            break
    assert best < LIMIT_SECONDS


def test_help_of_the_command_line_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from dflash_local import cli\n"
        "cli.parser().format_help()\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
