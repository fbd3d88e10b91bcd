"""NF4 and int8 weights through bitsandbytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from dflash_local.backends.torch_linear import DenseLinear, dense  # noqa: E402
from dflash_local.backends.torch_load import open_pair  # noqa: E402
from dflash_local.backends.torch_quant import Nf4Linear, Quantiser, refusal  # noqa: E402
from dflash_local.errors import OptionError  # noqa: E402
from tests.support.driving import done, plain, run  # noqa: E402
from tests.support.kits import Options  # noqa: E402
from tests.support.random_target import save_target  # noqa: E402
from tests.support.tiny import loop_pair  # noqa: E402


@pytest.mark.parametrize(("scheme", "most"), [("nf4", 0.15), ("int8", 0.02)])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_a_quantised_product_is_near_the_exact_one(
    scheme: str, most: float, rows: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator).bfloat16()
    added = torch.randn(96, generator=generator).bfloat16() if bias else None
    states = torch.randn(rows, 128, generator=generator).bfloat16()
    quantiser = Quantiser()
    with torch.inference_mode():
        out = quantiser.maker(scheme)("x", weight, added)(states).float()
        exact = DenseLinear(weight, added)(states).float()
    assert out.shape == exact.shape
    assert ((out - exact).norm() / exact.norm()).item() < most
    assert not quantiser.refused


def test_nf4_takes_at_most_six_tenths_of_a_byte_per_weight() -> None:
    quantiser = Quantiser()
    made = quantiser.maker("nf4")("x", torch.randn(256, 512).bfloat16(), None)
    assert made.bytes <= 0.6 * 256 * 512
    assert quantiser.quantised_bytes == made.bytes


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_direct_call_equals_the_operator(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    made = Nf4Linear(torch.randn(96, 128, generator=generator).bfloat16())
    states = torch.randn(128, rows, generator=generator).bfloat16().T
    with torch.inference_mode():
        direct = made(states)
        made._kernel = None
        torch.testing.assert_close(direct, made(states.contiguous()), rtol=0, atol=0)


def test_shapes_that_the_kernels_refuse_stay_as_they_are() -> None:
    quantiser = Quantiser()
    make = quantiser.maker("nf4")
    assert isinstance(make("narrow", torch.randn(64, 48)), DenseLinear)
    assert isinstance(make("odd", torch.randn(48, 64)), DenseLinear)
    assert quantiser.refused == [
        "narrow: 48 columns are no multiple of 64",
        "odd: 48 outputs are no multiple of 32",
    ]
    assert refusal("int8", (48, 48), torch.device("cpu")) is None


def test_an_unknown_scheme_is_an_option_error() -> None:
    with pytest.raises(OptionError, match="no quantisation 'q3'"):
        Quantiser().maker("q3")


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_a_quantised_pair_drafts_its_own_plain_ids(scheme: str, tmp_path: Path) -> None:
    target, draft = loop_pair(tmp_path)
    options = Options(dtype="bf16", quantize=scheme, context=200)
    backend = open_pair(target, draft, options, lambda step: None)
    assert backend.info.quantization == scheme
    truth = plain(backend, (5, 9, 2), 60)
    end = done(run(backend, (5, 9, 2), max_tokens=60))
    # Sums over several rows are ordered differently, so ids may part at a tie, and only there.
    at = next((i for i, (a, b) in enumerate(zip(truth, end.tokens, strict=True)) if a != b), None)
    if at is not None:
        backend.rewind(0)
        backend.extend([5, 9, 2, *truth[:at]])
        assert backend.margin() < 0.1
    assert end.stats.accepted > 0


def test_parts_may_have_bits_of_their_own(tmp_path: Path) -> None:
    save_target(tmp_path, "llama", vocab_size=512, tie_word_embeddings=True)

    def size(**options: object) -> int:
        chosen = Options(dtype="bf16", quantize="nf4", **options)  # type: ignore[arg-type]
        weights: int = open_pair(tmp_path, None, chosen, lambda step: None).memory().weights
        return weights

    assert size(head_bits=4) < size(head_bits=8)
    if isinstance(dense("head", torch.zeros(512, 64, dtype=torch.bfloat16)), DenseLinear):
        assert size(head_bits=16) < size(head_bits=4)
    else:
        assert size(head_bits=8) < size(head_bits=16)  # packed, so no longer the embedding itself


def test_a_family_through_transformers_is_quantised_too(tmp_path: Path) -> None:
    hybrid = {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "hidden_size": 512,
        "intermediate_size": 512,
    }
    save_target(tmp_path, "qwen3_5_text", **hybrid)  # type: ignore[arg-type]
    sizes = {}
    for scheme in ("none", "nf4"):
        options = Options(dtype="bf16", quantize=scheme)
        backend = open_pair(tmp_path, None, options, lambda step: None)
        sizes[scheme] = backend.memory().weights
        assert len(plain(backend, (5, 9, 2), 20)) == 20
    assert sizes["nf4"] < 0.5 * sizes["none"]
    assert "not quantised: layers.0.linear_attn.in_proj_b: 4 outputs are no multiple of 32" in (
        backend.info.kernels
    )


def test_nobody_is_asked_for_code_and_nothing_is_said(tmp_path: Path) -> None:
    """In a process of its own, as a library is imported once; with a package that would fetch."""
    (tmp_path / "kernels.py").write_text(
        "def get_kernel(*asked, **more):\n    raise SystemExit(9)\n"
    )
    source = """
import sys
from dflash_local.backends.torch_bnb import bitsandbytes

assert bitsandbytes().nn.Linear4bit
assert "kernels" not in sys.modules
import kernels
"""
    path = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, "")
