"""Rounds of every lean family can be captured: one host read, and the same work at the same
addresses round after round."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dflash_local.backends.torch_backend import TorchBackend  # noqa: E402
from dflash_local.backends.torch_graphs import Graphs  # noqa: E402
from dflash_local.backends.torch_load import open_pair  # noqa: E402
from dflash_local.lookup import NOTHING, Found, Lookup  # noqa: E402
from dflash_local.sampling import SamplingParams  # noqa: E402
from tests.support.draft_files import v2_pair  # noqa: E402
from tests.support.driving import PROMPT  # noqa: E402
from tests.support.kits import Options  # noqa: E402
from tests.support.random_target import save_target  # noqa: E402
from tests.support.tiny import loop_pair  # noqa: E402

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FORBIDDEN = ("_local_scalar_dense", "nonzero", "is_nonzero", "unique", "masked_select", "equal")
READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")

each_family = pytest.mark.parametrize("family", FAMILIES)
each_draft = pytest.mark.parametrize("make", [loop_pair, v2_pair], ids=["v1", "v2"])


def opened(
    family: str,
    make: Callable[[Path], tuple[Path, Path]],
    folder: Path,
    *,
    fixed: bool,
    **options: Any,
) -> TorchBackend:
    """A random target of a family under the tiny drafts."""
    _, draft = make(folder)
    settings = {"sliding_window": 16} if family == "mistral" else {}
    save_target(folder / family, family, **settings)
    backend: TorchBackend = open_pair(
        folder / family,
        draft,
        Options(context=512, **options),
        lambda step: None,
        graphs=fixed,
    )
    return backend


class NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that make the host wait for a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in str(func) for word in FORBIDDEN), func
        return func(*args, **(kwargs or {}))


class CountReads(TorchFunctionMode):
    """Counts what takes a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


@each_family
@each_draft
@pytest.mark.parametrize("fixed", [False, True], ids=["views", "fixed"])
def test_a_round_reads_the_device_once(family: str, make: Any, fixed: bool, tmp_path: Path) -> None:
    backend = opened(family, make, tmp_path, fixed=fixed)
    backend.extend(PROMPT)
    with CountReads() as counting:
        pending = backend.sample()
        assert sum(counting.reads.values()) == 1, "the counter counts"
        found = Lookup()
        found.extend((*PROMPT, *PROMPT))
        for count, branching in product((3, 3, 0, 2, 1, 0, 3), (False, True)):
            backend.configure(SamplingParams(branching=branching))
            counting.reads.clear()
            with NoReads():  # type: ignore[no-untyped-call]
                proposal = backend.propose(pending, count, found.ahead(3))
                assert not counting.reads
                verdict = backend.verify(proposal)
                assert counting.reads == Counter(tolist=1)
                backend.commit(verdict.accepted + 1)
            assert counting.reads == Counter(tolist=1)
            pending = verdict.next


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a function does: operators, their numbers, the shapes of all tensors, and the
    addresses of those that it did not make itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Any] = []
        self._own: dict[int, int] = {}
        self._alive: list[Any] = []

    def _known(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        own = self._own.get(value.untyped_storage().data_ptr())
        where = ("outside", value.data_ptr()) if own is None else ("own", own)
        return (*where, value.shape, value.stride(), value.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(leaves((args, tuple(kwargs.items()))))
        self.steps.append((func, [self._known(value) for value in given]))
        out = func(*args, **kwargs)
        seen = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
        for made in leaves((out,)):
            if isinstance(made, torch.Tensor):
                self._alive.append(made)
                place = made.untyped_storage().data_ptr()
                if place not in seen:
                    self._own[place] = len(self._own)
        return out


def leaves(values: Any) -> Iterator[Any]:
    """What lies in nested lists and tuples."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from leaves(value)
        else:
            yield value


@each_family
@each_draft
def test_a_hundred_rounds_are_the_same_work(
    family: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_hundred_rounds(opened(family, make, tmp_path, fixed=True), monkeypatch)


@each_draft
def test_a_hundred_trees_are_the_same_work(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened("qwen3", make, tmp_path, fixed=True)
    check_hundred_rounds(backend, monkeypatch, kinds=("tree", "descend"))


def test_options_that_save_memory_keep_it_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv_bits": 8, "embed_bits": 8, "draft_window": 24}
    backend = opened("qwen3", loop_pair, tmp_path, fixed=True, **options)
    check_hundred_rounds(backend, monkeypatch, draft_bucket=24 - 1 + 256 + 4)


def check_hundred_rounds(
    backend: TorchBackend,
    monkeypatch: pytest.MonkeyPatch,
    draft_bucket: int = 512,
    kinds: tuple[str, str] = ("draft", "verify"),
) -> None:
    first: dict[Any, list[Any]] = {}
    outputs: dict[Any, set[tuple[int, ...]]] = defaultdict(set)
    rounds: Counter[Any] = Counter()
    run = Graphs.run

    def traced(
        self: Graphs, key: Any, function: Callable[..., Sequence[Any]], *inputs: Any
    ) -> Sequence[Any]:
        assert key is not None, "something in a round has no fixed shape"

        def watched(*fixed: Any) -> Sequence[Any]:
            with Trace() as trace:
                out = function(*fixed)
            assert trace.steps == first.setdefault(key, trace.steps), key
            rounds[key] += 1
            return out

        out: Sequence[Any] = run(self, key, watched, *inputs)
        outputs[key].add(tuple(tensor.data_ptr() for tensor in out))
        return out

    backend.configure(SamplingParams(branching="tree" in kinds))
    backend.extend(PROMPT)
    pending = backend.sample()
    monkeypatch.setattr(Graphs, "run", traced)
    for index in range(100):
        advice = Found((5, 6, 7), (0.4, 0.5, 0.6)) if index % 3 else NOTHING
        verdict = backend.verify(backend.propose(pending, 3, advice))
        backend.commit(1 + index % 4)
        pending = verdict.next
    # All ran at one key each, except that as many kinds of context writes as kept rows.
    assert {kind for kind, _, _ in rounds} == {*kinds, "context"}
    assert rounds[(kinds[0], 4, draft_bucket)] == rounds[(kinds[1], 4, 512)] == 100
    assert sum(count for (kind, _, _), count in rounds.items() if kind == "context") == 100
    for key in rounds:
        assert len(first[key]) > 10, key
        assert len(outputs[key]) == 1, key
