"""The prompts of the bench: ten kinds of task, two of each, one of each in the first ten."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

PROMPTS: tuple[tuple[str, str], ...] = (
    ("chat", "I just moved to a new town and know nobody. How can I meet people?"),
    ("code", "Write a Python function that counts how often each word occurs in a text."),
    ("e-mail", "Write a short e-mail that asks my landlord to repair the heating."),
    ("explain", "Explain in simple words why the sky is blue."),
    ("list", "List ten things to pack for a weekend of hiking."),
    (
        "maths",
        "A shop sells pens for 3 dollars and notebooks for 5 dollars. I buy 4 pens and "
        "2 notebooks. How much do I pay? Show each step.",
    ),
    (
        "rewrite",
        "Rewrite this in a friendlier tone: Your report is late again. Send it by Friday "
        "or we will have a problem.",
    ),
    ("story", "Tell a short story about a lighthouse keeper who finds a message in a bottle."),
    (
        "summarise",
        "Summarise in two sentences: Bees live in colonies with one queen and thousands of "
        "workers. The workers gather nectar and pollen, feed the young and guard the hive. As "
        "they fly from flower to flower they carry pollen along, and many plants depend on that "
        "to make seeds. In recent years bees have become fewer, which worries farmers.",
    ),
    ("translate", "Translate into French: The train leaves at eight, so we should hurry."),
    ("chat", "What should I cook tonight with eggs, rice and a few vegetables?"),
    ("code", "Write a JavaScript function that checks whether a string is a palindrome."),
    ("e-mail", "Write an e-mail to my team that moves Monday's meeting to Wednesday at 10."),
    ("explain", "Explain what inflation is and why it matters to a family."),
    ("list", "Give me a list of eight questions to ask in a job interview."),
    ("maths", "What is 17 times 24? Work it out step by step."),
    ("rewrite", "Make this sentence shorter: In spite of the fact that it rained, we went out."),
    ("story", "Write the beginning of a mystery that is set in an old library."),
    (
        "summarise",
        "Summarise in one sentence: The city council met on Tuesday to discuss the new bridge. "
        "Some members said it costs too much, others that the old one is no longer safe. After "
        "three hours they agreed to ask an engineer for a report before they decide.",
    ),
    ("translate", "Translate into Spanish: Where can I buy a ticket for the museum?"),
)


def chosen(count: int) -> tuple[tuple[str, str], ...]:
    """The first ``count`` prompts."""
    return PROMPTS[:count]


def prompts_hash(prompts: Sequence[tuple[str, str]]) -> str:
    """Twelve hex digits that name exactly these prompts."""
    text = "\0".join(f"{kind}\0{prompt}" for kind, prompt in prompts)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
