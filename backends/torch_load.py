"""Opens a pair of folders on PyTorch: checks first, loads target and draft, binds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from dflash_local.backend import BackendInfo
from dflash_local.draft_config import read_draft_config
from dflash_local.errors import BackendUnavailable, OptionError, WeightsError
from dflash_local.events import LoadProgress
from dflash_local.weights import (
    check_draft,
    folder_shapes,
    read_json,
    refuse_own_code,
)

from . import torch_attention
from .torch_backend import TorchBackend
from .torch_draft_load import load_draft
from .torch_target import TargetShape, TorchTarget

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Values of ``model_type`` whose attention and caches are covered by tests."""

DEFAULT_CONTEXT = 8192

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Options(Protocol):
    """The load options that this backend reads."""

    @property
    def dtype(self) -> str | None:
        """``fp32``, ``bf16``, ``fp16`` or None for the device's best."""
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
        """Only None is possible yet."""
        ...


def open_pair(
    target_dir: Path,
    draft_dir: Path | None,
    options: Options,
    progress: Callable[[LoadProgress], None],
) -> TorchBackend:
    """Load the target in ``target_dir`` and the draft in ``draft_dir``.

    Raises:
        WeightsError: files are missing, damaged or of a refused kind.
        DraftMismatch: the draft does not fit the target.
        OptionError: an option cannot be honoured.
        BackendUnavailable: this family of models is not supported.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = _dtype(options.dtype, device)
    if options.quantize not in (None, "none"):
        raise OptionError(f"Quantisation {options.quantize!r} is not available on this backend.")
    if device.type == "cpu":
        torch.set_num_threads(options.threads or _threads())
    steps = 3 if draft_dir else 2
    progress(LoadProgress("checking files", 0, steps))
    config = _target_config(target_dir)
    shape = _shape(config, target_dir)
    limit = int(config.max_position_embeddings)
    context = _context(options.context, limit)
    draft_config = None
    if draft_dir is not None:
        draft_config = read_draft_config(draft_dir)
        draft_config.check_target(
            hidden_size=shape.hidden_size,
            layers=shape.layers,
            embedding_rows=shape.embedding_rows,
        )
        check_draft(draft_dir, draft_config)
    progress(LoadProgress("loading the target", 1, steps))
    model = _load_target(target_dir, config, dtype, device)
    taps = draft_config.target_layer_ids if draft_config else ()
    target = TorchTarget(model, shape, taps, context)
    draft = None
    if draft_dir is not None and draft_config is not None:
        progress(LoadProgress("loading the draft", 2, steps))
        draft = load_draft(draft_dir, draft_config, target, context)
    progress(LoadProgress("ready", steps, steps))
    info = BackendInfo(
        backend="torch",
        target=target_dir.name,
        draft=draft_dir.name if draft_dir else None,
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype={v: k for k, v in _DTYPES.items()}[dtype],
        quantization="none",
        vocab_size=shape.vocab_size,
        block_size=draft_config.block_size if draft_config else 1,
        context=context,
        stop_ids=_stop_ids(target_dir, config),
        versions=(("torch", torch.__version__), ("transformers", transformers.__version__)),
        kernels=(f"{torch.get_num_threads()} threads",) if device.type == "cpu" else (),
    )
    return TorchBackend(info, target, draft)


def native_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself (AVX512-BF16 or AMX); else fp32 is faster."""
    cpu = torch.backends.cpu.get_cpu_capability()
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    known = [getattr(torch.cpu, name) for name in probes if hasattr(torch.cpu, name)]
    return "AVX512" in cpu and any(probe() for probe in known)


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is not None:
        if name not in _DTYPES:
            raise OptionError(f"There is no dtype {name!r}.", f"Give one of {', '.join(_DTYPES)}.")
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.bfloat16 if native_bf16() else torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16


def _threads() -> int:
    """Threads for the small products of a decode step.

    They wait for each other at every operator, so a thread on a busy core stalls all; half of
    the physical cores leaves room for the rest of the machine.
    """
    return max(1, min(8, (os.cpu_count() or 2) // 4))


def _context(asked: int | None, limit: int) -> int:
    if asked is None:
        return min(limit, DEFAULT_CONTEXT)
    if not 1 <= asked <= limit:
        raise OptionError(f"The context is {asked}, the model holds 1 to {limit} tokens.")
    return asked


def _target_config(folder: Path) -> Any:
    raw = read_json(folder / "config.json")
    refuse_own_code(raw, folder)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise BackendUnavailable(
            f"The torch backend does not run {family!r} models yet.",
            f"It runs {', '.join(FAMILIES)}.",
        )
    folder_shapes(folder)
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise WeightsError(f"{folder}/config.json is not usable: {error}") from error


def _shape(config: Any, folder: Path) -> TargetShape:
    layers = int(config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    vocab = int(config.vocab_size)
    return TargetShape(
        hidden_size=int(config.hidden_size),
        layers=layers,
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=int(head_dim),
        vocab_size=vocab,
        embedding_rows=vocab,
        windows=_windows(config, layers),
    )


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing while it loads; what it finds is reported as errors."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _load_target(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        with _quiet():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=torch_attention.register(),
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise WeightsError(
            f"{folder} cannot be loaded: {error}", "Pull the model again."
        ) from error
    problems = [*report["missing_keys"], *(str(k) for k in report.get("mismatched_keys", ()))]
    if problems:
        raise WeightsError(f"{folder} lacks {sorted(problems)[0]}.", "Pull the model again.")
    return model.eval().to(device)


def _stop_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """Every end-of-sequence id of the generation config, else of the model's config."""
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = config.eos_token_id if ids is None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)
