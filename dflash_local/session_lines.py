"""The lines of a saved chat: what each adds to a conversation, checked before it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dflash_local.chat import Answer, Conversation, Turn, Version
from dflash_local.events import Channel

FORMAT = 1
_LARGEST = 1e12
"""Of a figure: more milliseconds, tokens or tokens per second than anybody waits for."""
_MOST_IDS = 1 << 31
_MOST_POSITIONS = 1000
"""Of a block, far above any draft's."""


def header(conversation: Conversation, model: str) -> dict[str, object]:
    """The first line of a file."""
    return {"kind": "chat", "format": FORMAT, "model": model, "system": conversation.system}


def begin(conversation: Conversation, record: Mapping[str, object]) -> str:
    """Take a header and return the model it names.

    Raises:
        TypeError, ValueError: it is damaged, or of another format.
    """
    if record.get("format") != FORMAT:
        raise ValueError(f"its format is {record.get('format')!r}, not {FORMAT}")
    conversation.system = _text(record.get("system", ""))
    return _text(record.get("model", ""))


def apply(conversation: Conversation, record: Mapping[str, object]) -> None:
    """Let a line after the header have its effect; of a kind not known it has none.

    Raises:
        KeyError, TypeError, ValueError, IndexError: it is damaged.
    """
    kind, turns = record["kind"], conversation.turns
    if kind == "system":
        conversation.system = _text(record["text"])
    elif kind == "cut":
        kept = _index(record["turns"], len(turns))
        del turns[kept:]
        if conversation.left_out >= kept:
            conversation.left_out = 0
    elif kind == "left_out":
        conversation.left_out = _index(record["turns"], max(0, len(turns) - 1))
    elif kind == "user":
        turn = _index(record["turn"], len(turns))
        versions = turns[turn].versions if turn < len(turns) else []
        place = _index(record["version"], len(versions))
        versions[place:] = [Version(_text(record["text"]))]
        turns[turn:] = [Turn(versions, place)]
    elif kind == "show":
        shown = turns[_index(record["turn"], len(turns) - 1)]
        shown.shown = _index(record["version"], len(shown.versions) - 1)
    elif kind in ("text", "answer"):
        versions = turns[_index(record["turn"], len(turns) - 1)].versions
        version = versions[_index(record["version"], len(versions) - 1)]
        if kind == "answer":
            version.answer = _plausible(_value(Answer, record["answer"]))
            return
        # Pieces without a finished answer behind them: the ids are not known.
        answer = replace(version.answer or Answer(), end="interrupted", tokens=())
        text = _text(record["text"])
        if _value(Channel, record["channel"]) == "think":
            version.answer = replace(answer, thinking=answer.thinking + text)
        else:
            version.answer = replace(answer, text=answer.text + text)


def _plausible(answer: Answer) -> Answer:
    """An answer without figures or ids that no machine gives; its text is worth more than they."""
    stats = answer.stats
    figures = (answer.usage, stats, answer.speedup)
    whole = all(map(_is_figure, _numbers(figures))) and (
        stats is None
        or (
            stats.accepted <= stats.drafted
            and max(stats.plain_rounds, stats.full_blocks) <= stats.rounds
            and max(len(stats.positions), len(stats.histogram)) <= _MOST_POSITIONS
            and all(rate.accepted <= rate.rounds for rate in stats.positions)
        )
    )
    if not whole:
        answer = replace(answer, usage=None, stats=None, speedup=None)
    if not all(0 <= token < _MOST_IDS for token in answer.tokens):
        answer = replace(answer, tokens=())
    return answer


def _numbers(value: object) -> Iterator[float]:
    """Every number inside a value of figures."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name))


def _is_figure(number: float) -> bool:
    return 0 <= number <= _LARGEST  # NaN is neither


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _index(value: object, last: int) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is no place")
    if not 0 <= value <= last:
        raise IndexError(f"there is no place {value}")
    return value


def _value(hint: Any, value: Any) -> Any:
    """What was written as JSON as a value of a type again: Any, for the type is an argument."""
    kind, options = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        for option in options:
            try:
                return _value(option, value)
            except TypeError:
                continue
    elif kind is Literal:
        if value in options:
            return value
    elif kind is tuple:
        if isinstance(value, list):
            return tuple(_value(options[0], item) for item in value)
    elif isinstance(hint, type) and is_dataclass(hint):
        if isinstance(value, dict):
            hints = get_type_hints(hint)
            known = {field.name: hints[field.name] for field in fields(hint)}
            return hint(**{name: _value(known.get(name), item) for name, item in value.items()})
    elif hint is float:
        if type(value) in (int, float):
            return value
    elif type(value) is hint or (hint is NoneType and value is None):
        return value
    raise TypeError(f"{value!r:.40} is no {getattr(hint, '__name__', hint)}")
