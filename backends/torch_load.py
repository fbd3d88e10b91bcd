"""Opens a pair of folders on PyTorch: checks first, loads target and draft, binds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
import transformers

from dflash_local.backend import BackendInfo
from dflash_local.draft_config import DraftConfig, read_draft_config
from dflash_local.errors import OptionError
from dflash_local.events import LoadProgress
from dflash_local.free_memory import cpu_threads
from dflash_local.sampling import SamplingParams
from dflash_local.weights import check_draft, read_json, stop_ids

from .torch_backend import TorchBackend
from .torch_config import target_config, target_shape
from .torch_draft import TorchDraft
from .torch_draft_load import load_draft
from .torch_graphs import Graphs
from .torch_kv_rows import kv_maker
from .torch_lane_attention import prepare
from .torch_lane_rows import fits
from .torch_lean import LeanTarget
from .torch_linear import dense, half, has_byte_products, has_half_products, light
from .torch_machine_code import lanes_of, use_threads
from .torch_memory import fail_loudly, memory_errors, require_room
from .torch_open_target import open_target
from .torch_prequant import is_prequantised
from .torch_quant import Quantiser, scheme_of_bits
from .torch_target import LayerShape, Target

DEFAULT_CONTEXT = 8192

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Options(Protocol):
    """The load options that this backend reads."""

    @property
    def dtype(self) -> str | None:
        """``fp32``, ``bf16``, ``fp16`` or None for the device's best. On a CPU fp16 is how weights
        are kept; states are computed in fp32."""
        ...

    @property
    def context(self) -> int | None:
        """Positions to hold; None is the model's own, up to 8192."""
        ...

    @property
    def threads(self) -> int | None:
        """CPU threads; None chooses."""
        ...

    @property
    def quantize(self) -> str | None:
        """``nf4``, ``int8`` or ``none`` for the body; None is NF4 on CUDA."""
        ...

    @property
    def head_bits(self) -> int | None:
        """4, 8 or 16 for the output head; None is as the body."""
        ...

    @property
    def draft_bits(self) -> int | None:
        """4, 8 or 16 for the draft; None is as the body, 8 on a CPU that leaves that as it is."""
        ...

    @property
    def draft_window(self) -> int | None:
        """Most positions that a draft's layer sees; None is as it was trained."""
        ...

    @property
    def kv_bits(self) -> int | None:
        """8 keeps K/V in 8 bits; None is as they are computed."""
        ...

    @property
    def embed_bits(self) -> int | None:
        """8 or 16 for the rows of the input embedding; None is 8 where CUDA quantises the body."""
        ...


def open_pair(
    target_dir: Path,
    draft_dir: Path | None,
    options: Options,
    progress: Callable[[LoadProgress], None],
    *,
    graphs: bool | None = None,
) -> TorchBackend:
    """Load the target in ``target_dir`` and the draft in ``draft_dir``.

    ``graphs`` asks for fixed addresses, so that rounds can be captured; None is on CUDA only, as
    they cost more on the CPU.

    Raises:
        WeightsError: files are missing, damaged or of a refused kind.
        DraftMismatch: the draft does not fit the target.
        OptionError: an option cannot be honoured.
        BackendUnavailable: this family of models is not supported.
        EngineError: the pair does not fit into memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers = options.dtype or _best(device)
    if numbers not in _DTYPES:
        raise OptionError(f"There is no dtype {numbers!r}.", f"Give one of {', '.join(_DTYPES)}.")
    halved = numbers == "fp16" and device.type == "cpu" and has_half_products()
    dtype = torch.float32 if halved else _DTYPES[numbers]
    plain = half if halved else dense
    fixed = device.type == "cuda" if graphs is None else graphs
    runner = Graphs(device, capture=device.type == "cuda") if fixed else None
    quantiser = Quantiser(plain)
    raw = read_json(target_dir / "config.json")
    stored = is_prequantised(raw, target_dir)
    if stored and options.quantize not in (None, "nf4"):
        raise OptionError(f"{target_dir.name} is stored in nf4 already.", "Leave --quantize out.")
    scheme = "nf4" if stored else options.quantize or _scheme(device)
    # What a 4-bit checkpoint left as it is, was left on purpose.
    body = plain if stored else quantiser.maker(scheme)
    head = quantiser.maker(scheme_of_bits(options.head_bits, scheme))
    drafting = quantiser.maker(scheme_of_bits(options.draft_bits, scheme))
    # What a CPU drafts fastest with, unless the draft's numbers were asked for.
    lightly = device.type == "cpu" and has_byte_products()
    lightly &= numbers != "fp32" and scheme == "none" and options.draft_bits is None
    drafting = light(plain) if lightly else drafting
    if device.type == "cpu":
        use_threads(options.threads or cpu_threads())
    steps = 3 if draft_dir else 2
    progress(LoadProgress("checking files", 0, steps))
    config = target_config(target_dir)
    shape = target_shape(config)
    limit = int(config.max_position_embeddings)
    context = _context(options.context, limit)
    draft_config = None
    if draft_dir is not None:
        draft_config = read_draft_config(draft_dir).limited(options.draft_window)
        draft_config.check_target(
            hidden_size=shape.hidden_size,
            layers=len(shape.layers),
            embedding_rows=shape.embedding_rows,
        )
        check_draft(draft_dir, draft_config)
    if device.type == "cuda":
        require_room(
            target_dir,
            draft_dir,
            device,
            dtype=numbers,
            quantize=scheme,
            draft_bits=options.draft_bits,
            head_bits=options.head_bits,
            context=context,
            draft_window=options.draft_window,
            kv_bits=options.kv_bits,
        )
        fail_loudly(device)
    taps = draft_config.target_layer_ids if draft_config else ()

    def load() -> tuple[Target, TorchDraft | None]:
        progress(LoadProgress("loading the target", 1, steps))
        target = open_target(
            target_dir,
            config,
            shape,
            taps,
            context,
            dtype,
            device,
            body=body,
            head=head,
            rows=kv_maker(options.kv_bits),
            packed=quantiser.packed if stored else None,
            embed_bits=options.embed_bits,
            halved=halved,
            graphs=fixed,
        )
        if draft_dir is None or draft_config is None:
            return target, None
        progress(LoadProgress("loading the draft", 2, steps))
        draft = load_draft(
            draft_dir,
            draft_config,
            target,
            context,
            drafting,
            graphs=fixed,
            target_dir=target_dir,
            light=lightly,
        )
        return target, draft

    with memory_errors(f"{target_dir.name} does not fit into the memory of {device}.", device):
        with ThreadPoolExecutor(1) as meanwhile:
            kept = () if options.kv_bits == 8 else shape.layers
            compiled = meanwhile.submit(_compile, kept, draft_config, dtype, device)
            target, draft = load()
        fused = compiled.result()
    info = BackendInfo(
        backend="torch",
        target=target_dir.name,
        draft=draft_dir.name if draft_dir else None,
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype=numbers,
        quantization=scheme,
        vocab_size=shape.vocab_size,
        block_size=draft_config.block_size if draft_config else 1,
        context=context,
        stop_ids=stop_ids(target_dir, [config.eos_token_id], shape.vocab_size),
        versions=_versions(quantiser),
        branching=target.cache.branching,
        kernels=_kernels(
            device,
            target,
            quantiser,
            options,
            halved=halved,
            lightly=lightly and draft_dir is not None,
            fused=fused,
        ),
    )
    backend = TorchBackend(info, target, draft, runner)
    if runner is not None:
        progress(LoadProgress("capturing graphs", steps, steps))
        _first_rounds(backend)
        if runner.failure is not None:
            progress(LoadProgress(runner.words, steps, steps))
    progress(LoadProgress("ready", steps, steps))
    return backend


def _first_rounds(backend: TorchBackend) -> None:
    """A plain round, a whole block and a tree of as many rows, so that what cannot be captured is
    known from the start."""
    whole = backend.info.block_size - 1
    backend.extend((0,))
    for count, branching in ((0, False), (whole, False), (whole, True)):
        backend.configure(SamplingParams(branching=branching))
        if backend.position + count + 1 < backend.info.context:
            backend.verify(backend.propose(0, count))
            backend.commit(1)
    backend.rewind(0)


def _compile(
    layers: Sequence[LayerShape],
    draft: DraftConfig | None,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Make the code of attention that rounds will run, where there is such; whether the target's
    layers, those that keep K/V as computed, have some."""
    lanes = lanes_of(dtype) if device.type == "cpu" else None
    if lanes is None:
        return False
    rows = 2 * draft.block_size if draft is not None else 1  # a tree has so many
    of_target = {(x.groups, x.head_dim) for x in layers if x.window is None and x.stored}
    of_draft = set()
    if draft is not None and None in draft.windows:
        of_draft.add((draft.heads // draft.kv_heads, draft.head_dim))
    for groups, dim in of_target | of_draft:
        if fits(dim, dtype, device):
            prepare(lanes, groups, dim, rows)
    return any(fits(dim, dtype, device) for _, dim in of_target)


def native_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself (AVX512-BF16 or AMX)."""
    cpu = torch.backends.cpu.get_cpu_capability()
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    known = [getattr(torch.cpu, name) for name in probes if hasattr(torch.cpu, name)]
    return "AVX512" in cpu and any(probe() for probe in known)


def _best(device: torch.device) -> str:
    """The name of the numbers that a device multiplies fastest."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(False) else "fp16"
    if native_bf16():
        return "bf16"
    return "fp16" if has_half_products() else "fp32"


def _context(asked: int | None, limit: int) -> int:
    if asked is None:
        return min(limit, DEFAULT_CONTEXT)
    if not 1 <= asked <= limit:
        raise OptionError(f"The context is {asked}, the model holds 1 to {limit} tokens.")
    return asked


def _scheme(device: torch.device) -> str:
    """Four bits where memory bandwidth decides and the kernels are there."""
    return "nf4" if device.type == "cuda" and find_spec("bitsandbytes") else "none"


def _kernels(
    device: torch.device,
    target: Target,
    quantiser: Quantiser,
    options: Options,
    *,
    halved: bool,
    lightly: bool,
    fused: bool,
) -> tuple[str, ...]:
    """How it runs, in words."""
    threads = torch.get_num_threads()
    words = [f"{threads} thread{'s' * (threads > 1)}"] if device.type == "cpu" else []
    words += ["weights in fp16, computed in fp32"] if halved else []
    words += ["draft in 8 bits"] if lightly else []
    words.append("lean forward" if isinstance(target, LeanTarget) else "transformers forward")
    words += ["attention compiled here"] if fused else []
    if quantiser.quantised_weights:
        each = quantiser.quantised_bytes / quantiser.quantised_weights
        words.append(f"{each:.2f} bytes per quantised weight")
    if options.kv_bits == 8:
        words.append("K/V in 8 bits")
    if options.draft_window is not None:
        words.append(f"draft window {options.draft_window}")
    return (*words, *(f"not quantised: {name}" for name in quantiser.refused))


def _versions(quantiser: Quantiser) -> tuple[tuple[str, str], ...]:
    """The libraries that made the figures."""
    versions = [("torch", torch.__version__), ("transformers", transformers.__version__)]
    if quantiser.quantised_weights:
        versions.append(("bitsandbytes", version("bitsandbytes")))
    return tuple(versions)
