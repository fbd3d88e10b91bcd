"""Five kinds of work, ten prompts each: what a draft accepts depends on what is written.

Code and sums repeat themselves and are drafted well, small talk is not, and a language that the
draft saw little of is the hardest.
"""

from __future__ import annotations

Prompts = tuple[tuple[str, str], ...]


def _of(kind: str, *texts: str) -> Prompts:
    return tuple((kind, text) for text in texts)


CHAT = _of(
    "chat",
    "My best friend forgot my birthday and I am a bit hurt. Should I say something?",
    "I have a free Sunday and it will rain all day. What could I do at home?",
    "Do you think it is worth learning to play the piano at forty?",
    "My neighbour's dog barks every morning at six. How do I bring it up politely?",
    "What is a good present for a colleague who is retiring and loves gardening?",
    "I keep putting off going to the dentist. Talk me into it.",
    "We are four friends with one small car. Where could we go for three days?",
    "I slept badly for a week. What might help me tonight?",
    "Which board game would you bring to an evening with people who hardly play?",
    "I start a new job on Monday and I am nervous. Any advice for the first day?",
)

CODE = _of(
    "code",
    "Write a Python class for a bank account with deposit, withdraw and a list of movements.",
    "Write a function in C that reverses a singly linked list, and explain each line.",
    "Give me an SQL query that lists the five customers who spent most last year.",
    "Write a Python script that renames all .jpeg files of a folder to .jpg.",
    "Show a small HTML page with a form for name and e-mail, and check both in JavaScript.",
    "Write a Rust function that returns the median of a slice of f64 values.",
    "Implement binary search in Java, with a comment for each step.",
    "Write a bash script that keeps the seven newest backups of a folder and deletes the rest.",
    "Write unit tests with pytest for a function slugify(text) that makes URL slugs.",
    "Write a Go program that counts the lines of every file given on the command line.",
)

MATHS = _of(
    "maths",
    "A train covers 180 km in 2 hours and 15 minutes. What is its average speed? Show the steps.",
    "Solve 3x + 7 = 25 and then check your answer.",
    "What is 15 percent of 240? Explain how you get there.",
    "A rectangle is 4 cm longer than it is wide and its area is 96 square cm. Find its sides.",
    "Add the fractions 2/3, 3/4 and 5/6, step by step.",
    "A coat costs 80 dollars, is reduced by 25 percent and then by another 10. What is its price?",
    "Write down the first twelve square numbers and the differences between neighbours.",
    "Two dice are thrown. What is the chance that the sum is 9? List the cases.",
    "Convert 1011011 from binary to decimal and show every place value.",
    "Anna is three times as old as Ben. In ten years she will be twice as old. How old are they?",
)

SUMMARISE = _of(
    "summarise",
    "Summarise in two sentences: The town library will close for three months to mend its roof. "
    "Books can be returned at the town hall, and a bus with the most wanted titles stops at the "
    "market every Thursday. The children's reading hour moves to the primary school.",
    "Give the main point in one sentence: Our trial compared two kinds of insulation in forty "
    "houses over two winters. Wood fibre cost more to install, but in the second winter those "
    "houses needed nine percent less heating, and their owners reported fewer draughts.",
    "Shorten this to three bullet points: To descale the kettle, fill it half with water and add "
    "two spoons of citric acid. Heat it without boiling, switch it off and wait for half an hour. "
    "Pour the water away, rinse twice, and boil clear water once before making tea.",
    "Summarise for a busy manager: The supplier will deliver the screws two weeks late because of "
    "a strike at the port. Production can go on with the stock until the 14th. Buying elsewhere "
    "costs twelve percent more. The sales team has promised the first machines for the 20th.",
    "Summarise this story in one sentence: A fisherman caught a talking carp that promised him a "
    "wish. He asked for nothing but a mended net. The carp was so surprised that it filled the "
    "net with fish every morning until the man was old.",
    "What are the two arguments here? Some say that homework should go, because children are "
    "tired and parents end up doing it. Others answer that practice at home is when a new skill "
    "settles, and that a short daily task teaches them to plan their time.",
    "Summarise in plain words: Photosynthesis converts light energy into chemical energy. In the "
    "chloroplasts, water is split, oxygen is released, and the energy gained is used to build "
    "sugars from carbon dioxide. Nearly all life on earth depends on it in the end.",
    "Write a headline and one sentence for this: On Saturday night a storm brought down some "
    "thirty trees in the city park. Nobody was hurt. The paths stay closed until the end of the "
    "week, and the open-air concert has been moved to the sports hall.",
    "Summarise this e-mail: Hi all, thanks for a good workshop. We agreed that Lena writes the "
    "draft by Tuesday, that Omar asks the lawyers about the licence, and that we meet again on "
    "Friday at ten. Please send me your travel receipts before the end of the month.",
    "Reduce this to its essence: The museum's new wing shows how people kept time before clocks: "
    "with shadows, candles, sand and dripping water. Visitors can build a sundial of their own. "
    "Entry is free for pupils, and guided tours start at eleven and at three.",
)

LANGUAGES = _of(
    "languages",
    "Nenne mir drei Gründe, warum man in der Stadt lieber Fahrrad fahren sollte.",
    "Explique-moi en quelques phrases comment on fait du pain à la maison.",
    "¿Qué lugares me recomiendas visitar en Granada en dos días?",
    "Scrivi una breve lettera a un amico che si è appena trasferito a Torino.",
    "Escreve uma pequena história sobre um gato que tem medo do mar.",
    "Wat zijn de voordelen van een klein huis? Noem er vijf.",
    "Opowiedz krótko, jak wygląda typowy dzień nauczyciela.",
    "Напиши короткое письмо соседу с просьбой поливать цветы во время отпуска.",
    "请用简单的话解释为什么会下雨。",
    "朝ごはんに作れる簡単な料理を三つ教えてください。",
)

TOPICS: dict[str, Prompts] = {
    "chat": CHAT,
    "code": CODE,
    "maths": MATHS,
    "summarise": SUMMARISE,
    "languages": LANGUAGES,
}
