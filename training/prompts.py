"""First stage: what is asked. The target writes users' turns; a file may add more."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_local.errors import OptionError
from dflash_local.prompting import ChatTokenizer, whole
from dflash_local.whole_file import write_whole

from .files import part
from .openings import OPENINGS
from .recipe import PromptsRecipe
from .teacher import Teacher
from .writer import write

Progress = Callable[[int, int, str], None]
"""What is done, of how much, and what is under way."""

_MARK = "\ue000here\ue000"
"""Stands for the user's text while the template around it is read; no template contains it."""

_SHORTEST = 8
"""Characters of a usable prompt."""

_WASTE = 3
"""The target is asked for at most so many times the prompts that are wanted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt."""

    kind: str
    text: str


class Frame:
    """What the chat template puts around a user's text.

    Raises:
        OptionError: there is no template, or it hides or changes the text.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        rendered = tokenizer.render([{"role": "user", "content": _MARK}], None)
        self.before, mark, after = rendered.partition(_MARK)
        ids = tokenizer.encode(after) if mark else []
        if not ids:
            raise OptionError(
                "The chat template does not show a user's text with an end behind it.",
                "Give --own 0 and --prompts FILE.",
            )
        self.end = ids[0]
        """The id that ends a user's turn."""


def make_prompts(
    folder: Path,
    recipe: PromptsRecipe,
    teacher: Callable[[], Teacher],
    tokenizer: ChatTokenizer,
    progress: Progress,
    known: frozenset[str] = frozenset(),
    salt: str = "",
) -> None:
    """Fill ``folder`` with ``train.jsonl`` and ``held_out.jsonl``.

    Every part that the target wrote is a file; an interrupted run goes on behind the last one.
    What it wrote that is ``known``, as ``key`` tells it, is left out; ``salt`` makes it write
    others than the seed alone would.

    Raises:
        OptionError: the file has broken lines, or there are too few prompts.
    """
    given = read_prompts(Path(recipe.file)) if recipe.file else []
    seen = {key(asked.text): asked for asked in given}
    wanted = len(seen) + recipe.own
    if recipe.own:
        frame = Frame(tokenizer)
        most_parts = -(-recipe.own * _WASTE // recipe.rows)

        def tell(note: str = "") -> None:
            progress(min(len(seen), wanted), wanted, note)

        for number in range(most_parts):
            path = part(folder, number, ".jsonl")
            if not path.is_file():
                draw = random.Random(f"{recipe.seed} {number}{salt}")
                written = _part(number, recipe, draw, frame, teacher(), tokenizer, tell)
                write_whole(path, _lines(written))
            for asked in read_prompts(path):
                if key(asked.text) not in known:
                    seen.setdefault(key(asked.text), asked)
            tell()
            if len(seen) >= wanted:
                break
    split(folder, list(seen.values())[:wanted], recipe.held_out, known)


def split(
    folder: Path, prompts: list[Asked], held_out: int, known: frozenset[str] = frozenset()
) -> None:
    """Hold some of every kind out, whichever hash lowest, and write both files; none of what is
    ``known``, as ``key`` tells it.

    Raises:
        OptionError: nothing would be left to train on.
    """
    if len(prompts) <= held_out:
        raise OptionError(
            f"There are {len(prompts)} different prompts, {held_out} of them to be held out.",
            "Give more prompts or a smaller --held-out.",
        )
    unknown = [asked for asked in prompts if key(asked.text) not in known]
    if len(unknown) < held_out:
        raise OptionError(
            f"{len(unknown)} of {len(prompts)} prompts are new, {held_out} are to be held out.",
            "Give more prompts or a smaller --held-out.",
        )
    kinds = sorted({asked.kind for asked in prompts})
    by_kind = {kind: sorted((p for p in unknown if p.kind == kind), key=_order) for kind in kinds}
    held: list[Asked] = []
    while len(held) < held_out:
        for kind in kinds:
            if by_kind[kind] and len(held) < held_out:
                held.append(by_kind[kind].pop(0))
    apart = {key(asked.text) for asked in held}
    train = [asked for asked in prompts if key(asked.text) not in apart]
    write_whole(folder / "held_out.jsonl", _lines(held))
    write_whole(folder / "train.jsonl", _lines(train))


def read_prompts(path: Path) -> list[Asked]:
    """Prompts of a JSONL file: ``{"text": ..., "kind": ...}`` per line, ``kind`` optional.

    Raises:
        OptionError: the file is missing, or a line is broken; the number of the line is named.
    """
    try:
        # Not splitlines: a text may hold the separators that it also splits at.
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise OptionError(
            f"{path} cannot be read: {reason}.", "Give a JSONL file in UTF-8."
        ) from None
    prompts, broken = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            text, kind = value["text"], value.get("kind", "given")
            if not (isinstance(text, str) and text.strip() and isinstance(kind, str)):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            broken.append(number)
            continue
        prompts.append(Asked(whole(kind), whole(text)))
    if broken:
        named = ", ".join(map(str, broken[:5])) + (" and more" if len(broken) > 5 else "")
        raise OptionError(
            f"{path}: {'line' if len(broken) == 1 else 'lines'} {named} of {len(lines)} "
            f"{'is' if len(broken) == 1 else 'are'} no prompt.",
            'Each line is an object like {"text": "What is a comet?", "kind": "explain"}.',
        )
    return prompts


def _part(
    number: int,
    recipe: PromptsRecipe,
    draw: random.Random,
    frame: Frame,
    teacher: Teacher,
    tokenizer: ChatTokenizer,
    tell: Callable[[str], None],
) -> Iterator[Asked]:
    """Turns that ended by themselves, of as many openings as fit a batch."""
    kinds = list(OPENINGS)
    turns = [kinds[(number * recipe.rows + row) % len(kinds)] for row in range(recipe.rows)]
    openings = [(kind, draw.choice(OPENINGS[kind])) for kind in turns]
    written = write(
        teacher,
        [tokenizer.encode(frame.before + opening) for _, opening in openings],
        most=recipe.longest,
        stop_ids=frozenset((frame.end, *tokenizer.stop_ids)),
        temperatures=[1.0] * len(openings),
        seed=draw.getrandbits(62),
        top_p=0.95,
        tell=tell,
    )
    for (kind, opening), turn in zip(openings, written, strict=True):
        text = opening + tokenizer.decode(turn.ids[turn.prompt_length :])
        if turn.finished and len(text.strip()) >= _SHORTEST and "\ufffd" not in text:
            yield Asked(kind, text.strip())


def key(text: str) -> str:
    """What two prompts that count as the same have in common."""
    return " ".join(text.casefold().split())


def _order(asked: Asked) -> str:
    return hashlib.sha256(key(asked.text).encode()).hexdigest()


def _lines(prompts: Iterator[Asked] | list[Asked]) -> str:
    return "".join(json.dumps(asdict(asked), ensure_ascii=False) + "\n" for asked in prompts)
