"""``dflash-local generate``: one prompt, one answer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TextIO

from dflash_local.chat import ENDS
from dflash_local.cli_load import (
    block_argument,
    load_arguments,
    open_engine,
    sampling,
    sampling_arguments,
    thinking_arguments,
)
from dflash_local.errors import OptionError
from dflash_local.events import Done, Event, Piece, Text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = 'example: dflash-local generate --model demo "Name three rivers."'
    parser.add_argument(
        "prompt", nargs="?", help="the user's message; - or a pipe: from standard input"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before it")
    parser.add_argument("--plain", action="store_true", help="decode without the draft")
    block_argument(parser)
    thinking_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    sampling_arguments(parser)
    load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer and print; the figures go to stderr."""
    prompt = args.prompt
    stdin: TextIO | None = sys.stdin
    if prompt == "-" or (prompt is None and stdin is not None and not stdin.isatty()):
        prompt = "" if stdin is None else stdin.read()
    if not (prompt or "").strip():
        raise OptionError(
            "The prompt is empty.", "Give the question as an argument, or pipe it in."
        )
    if args.plain and args.block is not None:
        raise OptionError("--plain and --block exclude each other.", "Give one of them.")
    settings = sampling(args)
    messages = [{"role": "user", "content": prompt}]
    if args.system:
        messages.insert(0, {"role": "system", "content": args.system})
    with open_engine(args) as engine:
        block = 0 if args.plain else args.block
        events = engine.stream(messages, settings, block=block, thinking=args.think)
        if args.json:
            return _as_json(events)
        try:
            return _as_text(events)
        except KeyboardInterrupt:
            print(flush=True)  # noqa: T201 - what is said of it begins its own line
            raise


def _as_text(events: Iterable[Event]) -> int:
    thinking = False
    for event in events:
        if isinstance(event, Text):
            for piece in event.pieces:
                if (piece.channel == "think") != thinking:
                    thinking = not thinking
                    print("[thinking]" if thinking else "\n[answer]", flush=True)  # noqa: T201
                print(piece.text, end="", flush=True)  # noqa: T201
        elif isinstance(event, Done):
            print()  # noqa: T201
            print(footer(event), file=sys.stderr)  # noqa: T201
    return 0


def _as_json(events: Iterable[Event]) -> int:
    pieces: list[Piece] = []
    for event in events:
        if isinstance(event, Text):
            pieces.extend(event.pieces)
        elif isinstance(event, Done):
            done = event
    report = {
        "text": "".join(p.text for p in pieces if p.channel == "answer"),
        "thinking": "".join(p.text for p in pieces if p.channel == "think"),
        "tokens": done.tokens,
        "reason": done.reason,
        "usage": asdict(done.usage),
        "stats": asdict(done.stats),
    }
    print(json.dumps(report))  # noqa: T201
    return 0


def footer(done: Done) -> str:
    """The figures of an answer in one line."""
    stats, usage = done.stats, done.usage
    parts = [f"{usage.completion_tokens} tok", f"{stats.tok_s:.0f} tok/s"]
    if stats.drafted:
        parts += [f"tau {stats.tau:.2f}", f"{stats.draft_rate:.0%} of drafts accepted"]
    parts += [f"first token {usage.prefill_ms / 1000:.2f} s", ENDS[done.reason]]
    return " · ".join(parts)
