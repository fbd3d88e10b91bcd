"""What the sampling tests need of a backend beyond ``kits``: its choices, numpy in and out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dflash_local.draft_config import DraftConfig
from dflash_local.sampling import SamplingParams
from tests.support.kits import Array, DraftProbe, Kit, MlxKit, TorchKit, _MlxProbe, _TorchProbe

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftedArrays:
    """Drafted ids ``[..., count]``, q and its ids ``[..., count, width]``."""

    ids: Ids
    q: Array
    candidates: Ids


@dataclass(frozen=True, slots=True)
class LatticeArrays:
    """Candidates ``[..., count, width]`` and steps ``[..., count, width, width]``."""

    candidates: Ids
    scores: Array


class LatticeProbe(DraftProbe, Protocol):
    """A DFlash 2 draft on its own."""

    def lattice(self, anchor: int, count: int) -> LatticeArrays:
        """Steps between the slots behind the anchor."""
        ...


class ChooserProbe(Protocol):
    """A backend's chooser; leading axes are independent answers."""

    def draft(self, scores: Array) -> DraftedArrays:
        """From ``[..., count, vocab]``."""
        ...

    def path(self, lattice: LatticeArrays) -> DraftedArrays:
        """From a lattice."""
        ...

    def judge(self, scores: Array, drafted: DraftedArrays) -> tuple[Ids, Ids]:
        """Accepted and next, ``[...]`` each, from ``[..., count + 1, vocab]``."""
        ...

    def pick(self, scores: Array) -> Ids:
        """``[..., 1]`` from ``[..., 1, vocab]``."""
        ...


class SamplingKit(Kit, Protocol):
    """A backend whose choices can be driven one by one."""

    def chooser(self, sampling: SamplingParams) -> ChooserProbe:
        """A freshly seeded chooser."""
        ...

    def distribution(self, logits: Array, sampling: SamplingParams) -> Array:
        """The target's probabilities."""
        ...

    def settle(self, probs: Array, drafted: DraftedArrays, uniforms: Array) -> tuple[Ids, Array]:
        """Accepted ``[...]`` and the weights ``[..., vocab]`` of the next id."""
        ...

    def sampled_path(
        self, lattice: LatticeArrays, sampling: SamplingParams, uniforms: Array
    ) -> DraftedArrays:
        """A path drawn with given uniforms."""
        ...

    def penalised(
        self, scores: Array, sampling: SamplingParams, prompt: Array, answer: Array, following: Ids
    ) -> Array:
        """Scores ``[..., rows, vocab]`` after penalties; counts ``[..., vocab]``."""
        ...

    def lattice_draft(
        self, config: DraftConfig, weights: Mapping[str, Array], embed: Array, head: Array
    ) -> LatticeProbe:
        """As ``draft``, for DFlash 2."""
        ...


class TorchSamplingKit(TorchKit):
    """PyTorch on the CPU."""

    def chooser(self, sampling: SamplingParams) -> ChooserProbe:
        """A chooser of torch_accept."""
        return _TorchChooser(sampling)

    def distribution(self, logits: Array, sampling: SamplingParams) -> Array:
        """Of torch_probs."""
        from dflash_local.backends.torch_probs import distribution

        return np.asarray(distribution(_tensor(logits), sampling, sampling.temperature))

    def settle(self, probs: Array, drafted: DraftedArrays, uniforms: Array) -> tuple[Ids, Array]:
        """Of torch_probs."""
        from dflash_local.backends.torch_probs import settle

        accepted, weights = settle(_tensor(probs), _drafted(drafted), _tensor(uniforms))
        return np.asarray(accepted)[..., 0], np.asarray(weights)

    def sampled_path(
        self, lattice: LatticeArrays, sampling: SamplingParams, uniforms: Array
    ) -> DraftedArrays:
        """Of torch_probs."""
        from dflash_local.backends.torch_probs import distribution, sampled_path

        rows = distribution(_tensor(lattice.scores), sampling, sampling.drafting_temperature)
        return _arrays(sampled_path(_lattice(lattice), rows, _tensor(uniforms)))

    def penalised(
        self, scores: Array, sampling: SamplingParams, prompt: Array, answer: Array, following: Ids
    ) -> Array:
        """Of torch_penalties."""
        from dflash_local.backends.torch_penalties import penalised

        arrays = map(_tensor, (prompt, answer, following))
        return np.asarray(penalised(_tensor(scores), sampling, *arrays))

    def lattice_draft(
        self, config: DraftConfig, weights: Mapping[str, Array], embed: Array, head: Array
    ) -> LatticeProbe:
        """A TorchDraft with a selector."""
        return _TorchLatticeProbe(config, weights, embed, head)


class _TorchLatticeProbe(_TorchProbe):
    def lattice(self, anchor: int, count: int) -> LatticeArrays:
        first = _tensor(np.array([anchor]))
        states = self._draft.slots(first, count)
        selector = self._draft.selector
        assert selector is not None
        found = selector.lattice(self._draft.scores(states), states, first)
        return LatticeArrays(np.asarray(found.candidates), np.asarray(found.scores))


class _TorchChooser:
    def __init__(self, sampling: SamplingParams) -> None:
        import torch

        from dflash_local.backends.torch_accept import chooser

        self._chooser = chooser(sampling, torch.device("cpu"))

    def draft(self, scores: Array) -> DraftedArrays:
        return _arrays(self._chooser.draft(_tensor(scores)))

    def path(self, lattice: LatticeArrays) -> DraftedArrays:
        return _arrays(self._chooser.path(_lattice(lattice)))

    def judge(self, scores: Array, drafted: DraftedArrays) -> tuple[Ids, Ids]:
        judged = np.asarray(self._chooser.judge(_tensor(scores), _drafted(drafted)))
        return judged[..., 0], judged[..., 1]

    def pick(self, scores: Array) -> Ids:
        return np.asarray(self._chooser.pick(_tensor(scores)))


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(np.array(array))


def _drafted(arrays: DraftedArrays) -> Any:
    from dflash_local.backends.torch_probs import Drafted

    return Drafted(*map(_tensor, (arrays.ids, arrays.q, arrays.candidates)))


def _lattice(arrays: LatticeArrays) -> Any:
    from dflash_local.backends.torch_probs import Lattice

    return Lattice(_tensor(arrays.candidates), _tensor(arrays.scores))


def _arrays(drafted: Any) -> DraftedArrays:
    """Of a chooser's draft; a greedy one has no q."""
    ids = _ids(drafted.ids)
    if drafted.q is None:
        return DraftedArrays(ids, np.ones((*ids.shape, 1), np.float32), ids[..., None])
    return DraftedArrays(ids, np.asarray(drafted.q), _ids(drafted.candidates))


class MlxSamplingKit(MlxKit):
    """MLX on whatever device it finds."""

    def chooser(self, sampling: SamplingParams) -> ChooserProbe:
        """A chooser of mlx_choice."""
        return _MlxChooser(sampling)

    def distribution(self, logits: Array, sampling: SamplingParams) -> Array:
        """Of mlx_probs."""
        from dflash_local.backends.mlx_probs import distribution

        return np.asarray(distribution(_mx(logits), sampling, sampling.temperature))

    def settle(self, probs: Array, drafted: DraftedArrays, uniforms: Array) -> tuple[Ids, Array]:
        """Of mlx_probs."""
        from dflash_local.backends.mlx_probs import settle

        accepted, weights = settle(_mx(probs), _mx_drafted(drafted), _mx(uniforms))
        return np.asarray(accepted)[..., 0], np.asarray(weights)

    def sampled_path(
        self, lattice: LatticeArrays, sampling: SamplingParams, uniforms: Array
    ) -> DraftedArrays:
        """Of mlx_probs."""
        from dflash_local.backends.mlx_probs import distribution, sampled_path

        rows = distribution(_mx(lattice.scores), sampling, sampling.drafting_temperature)
        return _arrays(sampled_path(_mx_lattice(lattice), rows, _mx(uniforms)))

    def penalised(
        self, scores: Array, sampling: SamplingParams, prompt: Array, answer: Array, following: Ids
    ) -> Array:
        """Of mlx_penalties."""
        from dflash_local.backends.mlx_penalties import penalised

        return np.asarray(
            penalised(_mx(scores), sampling, _mx(prompt), _mx(answer), _mx(following))
        )

    def lattice_draft(
        self, config: DraftConfig, weights: Mapping[str, Array], embed: Array, head: Array
    ) -> LatticeProbe:
        """An MlxDraft with a selector."""
        return _MlxLatticeProbe(config, weights, embed, head)


class _MlxLatticeProbe(_MlxProbe):
    def lattice(self, anchor: int, count: int) -> LatticeArrays:
        first = _mx(np.array([anchor]))
        states = self._draft.slots(first, count)
        selector = self._draft.selector
        assert selector is not None
        found = selector.lattice(self._draft.scores(states), states, first)
        return LatticeArrays(_ids(found.candidates), np.asarray(found.scores))


class _MlxChooser:
    def __init__(self, sampling: SamplingParams) -> None:
        from dflash_local.backends.mlx_choice import chooser

        self._chooser = chooser(sampling)

    def draft(self, scores: Array) -> DraftedArrays:
        return _arrays(self._chooser.draft(_mx(scores)))

    def path(self, lattice: LatticeArrays) -> DraftedArrays:
        return _arrays(self._chooser.path(_mx_lattice(lattice)))

    def judge(self, scores: Array, drafted: DraftedArrays) -> tuple[Ids, Ids]:
        judged = _ids(self._chooser.judge(_mx(scores), _mx_drafted(drafted)))
        return judged[..., 0], judged[..., 1]

    def pick(self, scores: Array) -> Ids:
        return _ids(self._chooser.pick(_mx(scores)))


def _mx(array: Any) -> Any:
    """An MLX array; ids in the type that the backend gives them."""
    import mlx.core as mx

    given = np.asarray(array)
    return mx.array(given.astype(np.int32) if given.dtype.kind == "i" else given)


def _mx_drafted(arrays: DraftedArrays) -> Any:
    from dflash_local.backends.mlx_probs import Drafted

    return Drafted(_mx(arrays.ids), _mx(arrays.q), _mx(arrays.candidates))


def _mx_lattice(arrays: LatticeArrays) -> Any:
    from dflash_local.backends.mlx_probs import Lattice

    return Lattice(_mx(arrays.candidates), _mx(arrays.scores))


def _ids(array: Any) -> Ids:
    return np.asarray(array).astype(np.int64)


def sampling_kits() -> list[SamplingKit]:
    """The kits of the backends installed here."""
    kits: list[SamplingKit] = []
    if find_spec("torch"):
        kits.append(TorchSamplingKit())
    if find_spec("mlx") and find_spec("mlx_lm"):
        kits.append(MlxSamplingKit())
    return kits
