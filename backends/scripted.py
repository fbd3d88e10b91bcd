"""A backend without a model: the target is a function, the draft is right as often as told.

Its caches are lists of ids, so it can check the loop's side of the contract as it goes: it
raises ``AssertionError`` on any call out of turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_local.backend import BackendInfo, Coverage, MemoryFigures, Proposal, Verdict
from dflash_local.errors import OptionError
from dflash_local.lookup import NOTHING, Found
from dflash_local.prompting import Message
from dflash_local.sampling import SamplingParams
from dflash_local.text import ThinkTags

TargetRule = Callable[[Sequence[int]], int]
"""The target's best next id after a history."""
AcceptRule = Callable[[int, int], int]
"""Of ``count`` ids drafted in verify number ``index`` (from 0), how many are right."""

END, SYSTEM, USER, ASSISTANT = 256, 257, 258, 259
BYTE_VOCAB = 260


def mixed_target(vocab_size: int) -> TargetRule:
    """An arbitrary but fixed target: the next id depends on the last three."""

    def rule(history: Sequence[int]) -> int:
        value = 17
        for token in history[-3:]:
            value = (value * 31 + token * 7 + 3) % 1_000_003
        return value % vocab_size

    return rule


def replies_target(replies: Sequence[str]) -> TargetRule:
    """Answers of ``ByteTokenizer`` ids: the n-th assistant turn spells the n-th reply."""
    spelled = [(*reply.encode(), END) for reply in replies]

    def rule(history: Sequence[int]) -> int:
        turns = [index for index, token in enumerate(history) if token == ASSISTANT]
        reply = spelled[(len(turns) - 1) % len(spelled)]
        said = len(history) - turns[-1] - 1
        return reply[said] if said < len(reply) else END

    return rule


def cycling(pattern: Sequence[int]) -> AcceptRule:
    """Accepted counts taken in turn from ``pattern``."""
    return lambda index, count: min(count, pattern[index % len(pattern)])


@dataclass(frozen=True, slots=True)
class ScriptedProposal:
    """A drafted block and the wrong ids in it."""

    tokens: tuple[int, ...]
    right: int

    @property
    def rows(self) -> int:
        """The anchor plus the drafted ids."""
        return len(self.tokens)


class ScriptedBackend:
    """The contract of ``Backend`` on plain lists.

    Args:
        target: the target's rule.
        accepts: how many drafted ids are right.
        round_ms: time that a verify takes, slept.
        token_ms: time per fed token in a prefill, slept.
        draft_ms: time that a draft takes, slept.
    """

    def __init__(
        self,
        target: TargetRule,
        accepts: AcceptRule,
        *,
        block_size: int = 8,
        vocab_size: int = BYTE_VOCAB,
        context: int = 4096,
        stop_ids: Sequence[int] = (END,),
        round_ms: float = 0.0,
        token_ms: float = 0.0,
        draft_ms: float = 0.0,
    ) -> None:
        self._target = target
        self._accepts = accepts
        self._round_ms = round_ms
        self._token_ms = token_ms
        self._draft_ms = draft_ms
        self._cache: list[int] = []
        self._draft_rows = 0
        self._pending_rows = 0
        self._open: ScriptedProposal | None = None
        self._has_logits = False
        self._verifies = 0
        self._info = BackendInfo(
            backend="scripted",
            target="scripted target",
            draft="scripted draft" if block_size > 1 else None,
            device="none",
            dtype="none",
            quantization="none",
            vocab_size=vocab_size,
            block_size=block_size,
            context=context,
            stop_ids=tuple(stop_ids),
        )

    @property
    def info(self) -> BackendInfo:
        """What is loaded."""
        return self._info

    @property
    def position(self) -> int:
        """Ids in the target's cache."""
        return len(self._cache)

    @property
    def coverage(self) -> Coverage:
        """Rows per cache."""
        return Coverage(len(self._cache), self._draft_rows, self._pending_rows)

    def configure(self, sampling: SamplingParams) -> None:
        """Only greedy: the script decides."""
        if not sampling.greedy or sampling.penalised:
            raise OptionError(
                "The scripted backend is greedy.", "Leave temperature and penalties out."
            )

    def rewind(self, position: int) -> int:
        """Trim both caches."""
        assert position >= 0
        self._open, self._has_logits = None, False
        del self._cache[position:]
        self._draft_rows = min(self._draft_rows, len(self._cache))
        self._pending_rows = len(self._cache) - self._draft_rows if self._drafts else 0
        return len(self._cache)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ids to the target's cache and, at once, to the draft's."""
        assert self._open is None, "extend inside an open block"
        assert tokens, "nothing to extend by"
        assert self.position + len(tokens) <= self._info.context, "past the context"
        assert all(0 <= token < self._info.vocab_size for token in tokens)
        time.sleep(self._token_ms * len(tokens) / 1000.0)
        self._cache.extend(tokens)
        self._project()
        self._has_logits = True

    def sample(self) -> int:
        """The rule's id after the cache."""
        assert self._has_logits, "no logits: extend first"
        return self._target(self._cache)

    def margin(self) -> float:
        """A script has no ties."""
        assert self._has_logits, "no logits: extend first"
        return 1.0

    def propose(self, pending: int, count: int, found: Found = NOTHING) -> ScriptedProposal:
        """``count`` ids, advised or not, the first of them as right as the accept rule says."""
        assert self._open is None, "propose inside an open block"
        assert 0 <= count < max(2, self._info.block_size), f"count {count} outside the block"
        assert self.position + count + 1 <= self._info.context, "past the context"
        right = self._accepts(self._verifies, count)
        history = [*self._cache, pending]
        for index in range(count):
            best = self._target(history)
            history.append(best if index < right else (best + 1) % self._info.vocab_size)
        if count:
            time.sleep(self._draft_ms / 1000.0)
            self._project()
        return ScriptedProposal(tuple(history[len(self._cache) :]), min(right, count))

    def verify(self, proposal: Proposal) -> Verdict:
        """Compare the drafted ids with the rule."""
        assert isinstance(proposal, ScriptedProposal)
        assert self._open is None, "verify inside an open block"
        time.sleep(self._round_ms / 1000.0)
        self._open, self._has_logits = proposal, False
        self._verifies += 1
        history = [*self._cache, proposal.tokens[0]]
        for accepted, token in enumerate(proposal.tokens[1:]):
            best = self._target(history)
            if best != token:
                return Verdict(proposal.tokens[1:], accepted, best)
            history.append(token)
        return Verdict(proposal.tokens[1:], proposal.rows - 1, self._target(history))

    def commit(self, keep: int) -> None:
        """Append the kept rows to the caches."""
        assert self._open is not None, "commit without verify"
        assert 1 <= keep <= self._open.rows, f"keep {keep} of {self._open.rows} rows"
        self._cache.extend(self._open.tokens[:keep])
        if self._drafts:
            self._pending_rows += keep
        if self._open.rows > 1:
            self._project()
        self._open = None

    def memory(self) -> MemoryFigures:
        """Nothing worth counting."""
        return MemoryFigures(0, 0, 0, 0, 0)

    def close(self) -> None:
        """Drop the caches."""
        self._cache.clear()

    @property
    def _drafts(self) -> bool:
        return self._info.draft is not None

    def _project(self) -> None:
        if self._drafts:
            self._draft_rows, self._pending_rows = len(self._cache), 0


class ByteTokenizer:
    """One id per UTF-8 byte, plus an end mark and one mark per role."""

    stop_ids = (END,)

    def __init__(self, tags: ThinkTags | None = None) -> None:
        self.tags = tags

    def encode(self, text: str) -> list[int]:
        """Bytes; the private characters that ``render`` writes become marks."""
        ids: list[int] = []
        for character in text:
            mark = ord(character) - 0xE000
            ids.extend([mark] if END <= mark < BYTE_VOCAB else character.encode())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the byte ids; marks are left out."""
        return bytes(token for token in ids if token < END).decode(errors="replace")

    def render(self, messages: Sequence[Message], thinking: bool | None) -> str:
        """Role mark, content, end mark; then the assistant's mark."""
        marks = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
        turns = [
            chr(0xE000 + marks[message["role"]]) + message["content"] + chr(0xE000 + END)
            for message in messages
        ]
        return "".join(turns) + chr(0xE000 + ASSISTANT)


def open_scripted(
    replies: Sequence[str] = ("Hello.",),
    *,
    accepts: Sequence[int] = (3, 7, 0, 5),
    block_size: int = 8,
    context: int = 65536,
    round_ms: float = 0.0,
    token_ms: float = 0.0,
    draft_ms: float = 0.0,
    tags: ThinkTags | None = None,
) -> tuple[ScriptedBackend, ByteTokenizer]:
    """A chat of canned replies: an ``Engine`` opener once its arguments are bound."""
    backend = ScriptedBackend(
        replies_target(replies),
        cycling(accepts),
        block_size=block_size,
        context=context,
        round_ms=round_ms,
        token_ms=token_ms,
        draft_ms=draft_ms,
    )
    return backend, ByteTokenizer(tags)
