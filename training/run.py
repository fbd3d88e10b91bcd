"""The three stages in a row, each resumed where it stands."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch

from dflash_local.disk import check_space
from dflash_local.errors import OptionError, WeightsError
from dflash_local.registry import locate
from dflash_local.target_shape import text_config
from dflash_local.tokenizer import HubTokenizer
from dflash_local.weights import read_json

from . import draft
from .answers import ORDER, batches, bytes_needed, make_answers, missing, parts
from .checkpoint import Progress
from .corpus import Corpus
from .device import choose_device, choose_dtype, memory_errors
from .earlier import check_folders, read_earlier
from .evaluate import Worth, evaluate, read_worth, write_worth
from .export import write_card, write_draft
from .fit import Fit
from .prompts import Asked, key, make_prompts, read_prompts
from .recipe import STAGES, Recipe, Stage
from .teacher import Teacher
from .workplace import held, hold, workplace


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """One step of a training."""

    stage: str
    """``prompts``, ``data``, ``fit`` or ``evaluate``."""
    done: int
    total: int
    """0 where not known yet."""
    note: str = ""
    """Figures for a person, where there are some."""


Report = Callable[[TrainProgress], None]


class Counting(Protocol):
    """Tells how far a stage is, and what is under way."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """``total`` is 0 where it is not known."""
        ...


_CHECKS = (0.25, 0.5, 0.75)
"""Shares of the steps at which some held-out prompts are answered."""

_CHECK_PROMPTS = 20

_SPARE = 256 * 2**20
"""Bytes of the disk that stay free beside the answers."""

_TEMPLATE = 64
"""Tokens that a chat template may add to a prompt, generously."""


class Training:
    """A target, a folder and the recipe.

    Args:
        model: a name of the registry, or a folder with the target.
        out: where everything is kept; the draft lies in ``out/draft`` at the end.
        recipe: the numbers.
        threads: CPU threads; None leaves it to torch.
        report: called with every step.

    Raises:
        DflashError: the target is not here, damaged or has no chat template; a training that is to
            be learnt from too does not fit.
    """

    def __init__(
        self,
        model: str,
        out: Path,
        recipe: Recipe,
        threads: int | None = None,
        report: Report = lambda step: None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.target = locate(model, backend="torch").target_dir
        self.out, self.recipe, self._report = out, recipe, report
        self._tokenizer = HubTokenizer(self.target)
        # Fails at once, in one line, where there is no template to ask through.
        self._tokenizer.render([{"role": "user", "content": "Hi"}], recipe.data.thinking)
        self.device = choose_device()
        self._dtype = choose_dtype(self.device)
        depth, self._hidden, self._positions, vocab = _numbers(self.target)
        self._taps = draft.tap_layers(depth, recipe.data.taps)
        draft.check(recipe.fit, self._hidden, depth, vocab, self._taps)
        check_folders([Path(folder) for folder in recipe.fit.others], out)
        self._earlier = [
            read_earlier(Path(folder), self.target, recipe.data, self._taps)
            for folder in recipe.fit.others
        ]
        self._learnt = frozenset[str]().union(*(other.learnt for other in self._earlier))
        self._teacher_held: Teacher | None = None

    def run(self, stages: Sequence[Stage] = STAGES) -> None:
        """Do the stages that are asked for, in order.

        Raises:
            DflashError: what is wrong and what to do about it.
        """
        with workplace(self.out, self.target), memory_errors():
            for stage in STAGES:
                if stage in stages:
                    getattr(self, f"_{stage}")()

    def worth(self) -> dict[str, Any] | None:
        """The last evaluation as plain values; None before there is one."""
        found = read_worth(self.out / "fit" / "held_out.jsonl")
        return asdict(found[-1][1]) if found else None

    def _prompts(self) -> None:
        recipe, folder = self.recipe.prompts, self.out / "prompts"
        given = read_prompts(Path(recipe.file)) if recipe.file else []
        self._check_lengths(given)
        whole = {"prompts": _digest(given), "own": recipe.own, "held_out": recipe.held_out}
        if (folder / "train.jsonl").is_file():
            hold(folder / "whole.json", whole)
            return
        own = {"seed": recipe.seed, "longest": recipe.longest, "rows": recipe.rows}
        hold(folder / "recipe.json", own)
        counting = self._counting("prompts")
        if recipe.own:
            self._report(TrainProgress("prompts", 0, recipe.own, "loading the target"))
        known = self._learnt.union(*(other.held_out for other in self._earlier))
        salt = "".join(f" {other.digest}" for other in self._earlier)
        make_prompts(folder, recipe, self._teacher, self._tokenizer, counting, known, salt)
        hold(folder / "whole.json", whole)

    def _check_lengths(self, prompts: Sequence[Asked]) -> None:
        """Refuse a prompt that leaves no room for an answer."""
        room = self._positions - self.recipe.data.answer_tokens - _TEMPLATE
        if self.recipe.prompts.own and room < self.recipe.prompts.longest:
            raise OptionError(
                f"Beside answers of {self.recipe.data.answer_tokens} tokens the target's context "
                f"of {self._positions} has no room for prompts of {self.recipe.prompts.longest}.",
                "Give a smaller --answer-tokens.",
            )
        for asked in prompts:
            length = len(self._tokenizer.encode(asked.text))
            if length > room:
                raise OptionError(
                    f"The prompt that begins {asked.text[:30]!r} has {length} tokens; beside an "
                    f"answer the target's context has room for {max(0, room)}.",
                    "Shorten it or leave it out.",
                )

    def _data(self) -> None:
        recipe, folder = self.recipe.data, self.out / "data"
        prompts = self._asked("train")
        self._held_out()
        left = missing(folder, recipe, len(prompts))
        if len(left) == batches(recipe, len(prompts)):
            (folder / "recipe.json").unlink(missing_ok=True)  # nothing is bound to it yet
        self._hold_data(prompts)
        longest = max(len(self._tokenizer.encode(asked.text)) for asked in prompts) + _TEMPLATE
        width = len(self._taps) * self._hidden
        count = min(len(prompts), len(left) * recipe.rows)
        needed = bytes_needed(recipe, count, width, longest)
        if left:
            note = f"up to {needed / 1e6:,.0f} MB will be written to {folder}"
            self._report(TrainProgress("data", 0, 0, note))
        check_space(
            self.out,
            needed,
            "For the answers ",
            "Give --features recompute, fewer prompts or another --out.",
            error=OptionError,
            reserve=_SPARE,
        )
        counting = self._counting("data")
        make_answers(folder, recipe, prompts, left, self._teacher, self._tokenizer, counting)

    def _hold_data(self, prompts: Sequence[Asked]) -> None:
        facts = {**asdict(self.recipe.data), "tap_layers": list(self._taps), "order": ORDER}
        hold(self.out / "data" / "recipe.json", {**facts, "prompts": _digest(prompts)})

    def _fit(self) -> None:
        recipe, folder = self.recipe.fit, self.out / "fit"
        prompts = self._asked("train")
        if held(self.out / "data" / "recipe.json") is None:
            raise OptionError(f"{self.out} holds no answers yet.", "Run --stage data first.")
        self._hold_data(prompts)
        left = missing(self.out / "data", self.recipe.data, len(prompts))
        if left:
            raise OptionError(
                f"{len(left)} parts of the answers are missing, the first is number {left[0]}.",
                "Run --stage data, which writes them.",
            )
        own = parts(self.out / "data", self.recipe.data, len(prompts))
        corpus = Corpus([*own, *(path for other in self._earlier for path in other.parts)])
        teacher = self._teacher()
        unused = corpus.unused(len(teacher.head))
        mask = draft.mask_id(unused, self._tokenizer.special_ids, len(teacher.head))
        positions = max(corpus.length(i) for i in range(len(corpus))) + recipe.block
        raw = draft.settings(teacher.config, recipe, self._taps, mask, self._positions)
        network, raw = draft.start(recipe, raw, teacher, positions)
        free = ("rate", "clip", "save_seconds", "eval_tokens")
        begun = {k: v for k, v in asdict(recipe).items() if k not in free}
        begun["selector"] = recipe.selector or None
        begun["others"] = [other.digest for other in self._earlier] or None
        hold(folder / "recipe.json", begun)
        autocast = self._dtype if self._dtype != torch.float32 else None
        fit = Fit(folder, recipe, network, corpus, teacher, autocast)
        worth = read_worth(folder / "held_out.jsonl")

        def tell(progress: Progress, loss: float, tau: float) -> None:
            note = f"loss {loss:.3f}, tau {tau:.2f} on the blocks trained on"
            self._report(TrainProgress("fit", progress.step, progress.steps, note))
            at = [round(share * progress.steps) for share in _CHECKS]
            if progress.step in at and progress.step not in [step for step, _ in worth]:
                self._check(fit, raw, worth, _CHECK_PROMPTS)

        fit.run(tell)
        self._check(fit, raw, worth, None)
        write_card(
            self.out / "draft",
            self.target.name,
            self.recipe,
            fit.progress,
            worth,
            len(corpus),
            corpus.answer_tokens,
            sum(p.numel() for p in network.parameters()),
            f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
            if self.device.type == "cpu"
            else torch.cuda.get_device_name(),
        )

    def _check(
        self, fit: Fit, raw: dict[str, object], worth: list[tuple[int, Worth]], count: int | None
    ) -> None:
        """Export the draft as it is and answer held-out prompts with it."""
        step = fit.progress.step
        write_draft(self.out / "draft", fit.network, raw, fit.ids)
        found = evaluate(
            self.target,
            self.out / "draft",
            self._held_out()[:count],
            max_tokens=self.recipe.fit.eval_tokens,
            thinking=self.recipe.data.thinking,
            progress=self._counting("evaluate"),
        )
        worth[:] = [(s, w) for s, w in worth if s != step] + [(step, found)]
        self._report(
            TrainProgress("fit", step, fit.progress.steps, f"held out: tau {found.tau:.2f}")
        )
        write_worth(self.out / "fit" / "held_out.jsonl", worth)

    def _held_out(self) -> list[Asked]:
        """The prompts that no training behind this draft has learnt from."""
        asked = [a for a in self._asked("held_out") if key(a.text) not in self._learnt]
        if not asked:
            raise OptionError(
                f"The trainings behind --with learnt from every prompt that {self.out} holds out.",
                "Give another --out, for prompts of its own.",
            )
        return asked

    def _asked(self, name: str) -> list[Asked]:
        path = self.out / "prompts" / f"{name}.jsonl"
        if not path.is_file():
            raise OptionError(f"{path} is not there yet.", "Run --stage prompts first.")
        asked = read_prompts(path)
        if name == "train" and not asked:
            raise OptionError(f"{path} holds no prompts.", "Delete it and run --stage prompts.")
        return asked

    def _teacher(self) -> Teacher:
        if self._teacher_held is None:
            self._teacher_held = Teacher(self.target, self._taps, self.device, self._dtype)
        return self._teacher_held

    def _counting(self, stage: str) -> Counting:
        return lambda done, total, note="": self._report(TrainProgress(stage, done, total, note))


def _digest(prompts: Sequence[Asked]) -> str:
    """Tells sets of prompts apart."""
    return sha256(repr(prompts).encode()).hexdigest()[:16]


def _numbers(target: Path) -> tuple[int, int, int, int]:
    """Layers, hidden size, positions and ids of a target.

    Raises:
        WeightsError: config.json does not say.
    """
    raw = read_json(target / "config.json")
    text = text_config(raw)
    try:
        depth, hidden, vocab = (
            int(text[name]) for name in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        positions = int(text.get("max_position_embeddings") or 8192)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise WeightsError(
            f"{target}/config.json does not say how many layers of which size there are.",
            "Pull the model again.",
        ) from None
    return depth, hidden, positions, vocab
