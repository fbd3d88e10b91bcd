"""Driving a backend by hand and through the loop."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_local.backend import Backend, Verdict
from dflash_local.events import Done, Event, Piece, Round
from dflash_local.lookup import Lookup
from dflash_local.loop import generate
from dflash_local.sampling import SamplingParams
from dflash_local.text import ReplyText
from dflash_local.width import FixedWidth

PROMPT = (103, 41, 66, 48, 48, 125, 108, 22)


def check_coverage(backend: Backend) -> None:
    """The invariant at the top of every round."""
    covered = backend.coverage
    assert covered.target == backend.position
    if backend.info.draft is not None:
        assert covered.draft + covered.pending == covered.target


def one_round(backend: Backend, pending: int, count: int, keep: int | None = None) -> Verdict:
    """Propose, verify, commit; keeps what was accepted unless told otherwise."""
    proposal = backend.propose(pending, count)
    assert proposal.rows == count + 1
    before = backend.position
    verdict = backend.verify(proposal)
    assert backend.position == before
    kept = verdict.accepted + 1 if keep is None else keep
    backend.commit(kept)
    assert backend.position == before + kept
    check_coverage(backend)
    return verdict


def plain(backend: Backend, prompt: Sequence[int], length: int) -> list[int]:
    """Greedy ids without drafting."""
    backend.rewind(0)
    backend.extend(prompt)
    ids = [backend.sample()]
    while len(ids) < length:
        ids.append(one_round(backend, ids[-1], 0).next)
    return ids


def run(
    backend: Backend,
    prompt: Sequence[int] = PROMPT,
    *,
    count: int = 3,
    max_tokens: int | None = 40,
    stop_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    prefill_slice: int = 512,
    branching: bool = True,
    lookup: bool = False,
) -> list[Event]:
    """The loop from a cold cache; text is each id in brackets."""
    sampling = SamplingParams(max_tokens=max_tokens, stop=tuple(stop), branching=branching)
    backend.configure(sampling)
    backend.rewind(0)
    events = []
    for event in generate(
        backend,
        prompt,
        sampling,
        width=FixedWidth(count),
        lookup=Lookup() if lookup else None,
        reader=ReplyText(lambda ids: "".join(f"[{i}]" for i in ids), stop),
        stop_ids=frozenset(stop_ids),
        prefill_slice=prefill_slice,
    ):
        events.append(event)
        if isinstance(event, Round):
            check_coverage(backend)
    return events


def done(events: Sequence[Event]) -> Done:
    """The last event."""
    last = events[-1]
    assert isinstance(last, Done)
    return last


def text(pieces: Sequence[Piece]) -> str:
    """Joined pieces."""
    return "".join(piece.text for piece in pieces)
