"""The prompts of the bench: tasks written by people, and turns that the demo target wrote itself.

A draft is trained on what its target says, so tasks alone show it on strange ground, and the
target's own words alone on familiar ground. The default takes turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dflash_local.bench_topics import TOPICS, Prompts

PROMPTS: Prompts = (
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
"""Ten kinds of task, two of each, one of each in the first ten."""

_OWN_WORDS: tuple[str, ...] = (
    (
        "I'm in the process of launching a new business: a sustainable fashion brand "
        "using recycled materials. I need help with a business plan. Can you guide me "
        "through it?"
    ),
    (
        "Can you provide a more accurate version of the given text, with the requested "
        'improvements?\n\nThe text provided is: "The new employee had no idea that his '
        "boss wasn't there but had no idea how to find a new job.\""
    ),
    (
        "I'm considering a career change and I'm not sure what I want to do. I'm a bit "
        "unsure about the tech industry and the tech sector seems to have a lot of "
        "uncertainty and unpredictability. Can you help me navigate this uncertainty?"
    ),
    (
        "I'm planning a surprise party for my best friend's wedding. I want to make "
        "sure everything is done just in time. Can you help me with that?"
    ),
    (
        "Can you provide a detailed explanation of the different types of geological "
        "structures, including plate tectonics?"
    ),
    (
        "I'm looking to launch a bookmarket that will sell eco-friendly home products. "
        "Can you help me plan a plan for this?"
    ),
    (
        "I'm planning a road trip across the United States and I'm trying to plan a "
        "mix of cities, including New York City and Chicago. I'm unsure about the best "
        "order to visit each city. Can you provide me with a list of cities that fit "
        "the idea of a road trip across the US?"
    ),
    "Can you provide a JSON data schema that supports ENP (Endpoint Enumeration)?",
    (
        "I'm considering making a career change and I'm looking for guidance. Can you "
        "help me explore some career options?"
    ),
    (
        "Can you help me create a relatable character from a fantasy world with "
        "superpowers? I need to add some unique abilities to my character to make them "
        "more interesting and believable?"
    ),
    (
        "I've been offered a job in a new city, but it seems to have a high risk of "
        "being taken with a cargo ship. Could you provide some advice on how to "
        "minimize risks in this situation?"
    ),
    (
        "I'm here to attend a professional football tournament. Can you provide me "
        "with a list of the top 5 teams I can join?"
    ),
    (
        "I'm working on a marketing project with a non-profit and I'm struggling to "
        "optimize my marketing strategy. Can you help me with that?"
    ),
    (
        "I'm looking to create a new community-driven podcast, I'd like to focus on "
        "food recovery in developing countries. What steps can I take to start this "
        "project?"
    ),
    ("Can you help me find the best budget-friendly places to eat in a 7 day trip to Morocco?"),
    (
        "I'm considering buying a home in California. Can you help me choose a "
        "suitable location for my dream home?"
    ),
    (
        "I'm considering whether to switch to a new job. However, I'm worried about "
        "the uncertainty of having to relaunch my resume every few months. What should "
        "I do?"
    ),
    "I'm looking for a new puppy for my family. Can you recommend a few options?",
    (
        "I'm looking for a new notebook to use for future professional training and I "
        "need a list of 5 important things to remember before creating one."
    ),
    "I'm looking for a new laptop model. Can you suggest any good ones?",
)

OWN = tuple(("own words", text) for text in _OWN_WORDS)
"""User turns sampled from the demo target at temperature 0.8 and top-p 0.95, as they came."""

SETS: dict[str, Prompts] = {
    "all": tuple(prompt for pair in zip(OWN, PROMPTS, strict=True) for prompt in pair),
    "tasks": PROMPTS,
    "own": OWN,
    **TOPICS,
}


def chosen(count: int, *names: str) -> Prompts:
    """The first ``count`` prompts of each set; of ``all`` where none is named."""
    return tuple(prompt for name in names or ("all",) for prompt in SETS[name][:count])


def prompts_hash(prompts: Sequence[tuple[str, str]]) -> str:
    """Twelve hex digits that name exactly these prompts."""
    text = "\0".join(f"{kind}\0{prompt}" for kind, prompt in prompts)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
