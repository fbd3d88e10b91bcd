"""What /set, /system, /think and /block change in a chat; each returns the words that say so."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_local.chat import Chat
from dflash_local.errors import OptionError


@dataclass(frozen=True, slots=True)
class Setting:
    """A sampling setting by the name that users type."""

    name: str
    field: str
    """Of ``SamplingParams``, which checks the value."""
    meaning: str
    whole: bool = False
    may_be_off: bool = False


SETTINGS = (
    Setting("temp", "temperature", "0 always takes the best token"),
    Setting("top_p", "top_p", "the smallest set of tokens that reaches this share; 1 is all"),
    Setting("top_k", "top_k", "only the k best tokens; 0 is all", whole=True),
    Setting("min_p", "min_p", "only tokens at least this share as likely as the best; 0 is all"),
    Setting("repeat", "repetition_penalty", "divides the score of tokens seen so far; 1 is none"),
    Setting("presence", "presence_penalty", "taken once off tokens of the answer; 0 is none"),
    Setting("frequency", "frequency_penalty", "taken off for every time they came; 0 is none"),
    Setting("seed", "seed", "the same seed gives the same text; off draws one", True, True),
    Setting(
        "max", "max_tokens", "most tokens in an answer; off is what the context holds", True, True
    ),
)
_BY_NAME = {name: setting for setting in SETTINGS for name in (setting.name, setting.field)}


def make_room(chat: Chat) -> str:
    """Leave the oldest turns out of requests.

    Raises:
        OptionError: there is only one turn, or none.
    """
    turns = chat.make_room() if chat.conversation.turns else 0
    if not turns:
        raise OptionError(
            "There are no older turns to leave out.",
            "Start a new chat, or load with a larger context.",
        )
    were = "turn is" if turns == 1 else f"{turns} turns are"
    return f"The oldest {were} left out from now on; the chat still shows and saves all of it."


def set_sampling(chat: Chat, argument: str) -> str:
    """``name value`` changes one setting; nothing tells them all.

    Raises:
        OptionError: no such setting, or no such value.
    """
    name, _, value = argument.partition(" ")
    sampling = chat.options.sampling
    if not name:
        values = ((s.name, getattr(sampling, s.field)) for s in SETTINGS)
        shown = ", ".join(f"{key} {'off' if v is None else v}" for key, v in values)
        return f"Settings: {shown}."
    setting = _BY_NAME.get(name)
    if setting is None:
        names = ", ".join(setting.name for setting in SETTINGS)
        raise OptionError(f"There is no setting {name[:40]}.", f"Give {names}.")
    try:
        number: float | int | None = int(value) if setting.whole else float(value)
    except ValueError:
        if value != "off" or not setting.may_be_off:
            raise OptionError(
                f"Not a number: {value[:40] or 'nothing'}.",
                f"Give {name} one: {setting.meaning}.",
            ) from None
        number = None
    # Any: the field's type depends on its name; SamplingParams checks the value.
    changes: dict[str, object] = {setting.field: number}
    sampling = replace(sampling, **changes)  # type: ignore[arg-type]
    chat.options = replace(chat.options, sampling=sampling)
    return f"{name} is {'off' if number is None else number} from the next answer on."


def set_system(chat: Chat, argument: str) -> str:
    """A text, or ``off``; nothing tells the present one."""
    if not argument:
        return f"System prompt: {chat.conversation.system or 'none'}"
    chat.set_system("" if argument == "off" else argument)
    return "System prompt changed from the next answer on."


def set_thinking(chat: Chat, argument: str) -> str:
    """Whether the model is asked to think.

    Raises:
        OptionError: neither on, off nor auto.
    """
    choices = {"on": True, "off": False, "": None, "auto": None}
    if argument not in choices:
        raise OptionError(f"Not a choice: {argument[:40]}.", "Give on, off or auto.")
    chat.options = replace(chat.options, thinking=choices[argument])
    condition = ", if this model has such a mode" if choices[argument] else ""
    return f"Thinking is {argument or 'auto'} from the next answer on{condition}."


def set_block(chat: Chat, argument: str, most: int) -> str:
    """Rows per verify up to ``most``; ``off`` is plain decoding.

    Raises:
        OptionError: no such block.
    """
    if argument in ("off", "0"):
        block: int | None = 0
    elif argument in ("", "on", "auto"):
        block = None
    elif argument.isdecimal() and 1 <= int(argument[:9]) <= most:
        block = int(argument)
    else:
        raise OptionError(f"Not a block size: {argument[:40]}.", f"Give 1 to {most}, off or auto.")
    chat.options = replace(chat.options, block=block)
    words = {None: "The block that pays", 0: "Plain decoding"}.get(block, f"Block {block}")
    return f"{words} from the next answer on."
