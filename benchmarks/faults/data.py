"""Fields of the tasks' rows."""

import random
from typing import Any

CAPITALS = """France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, Egypt Cairo, Greece Athens,
Portugal Lisbon, Norway Oslo, Sweden Stockholm, Finland Helsinki, Poland Warsaw, Austria Vienna, Hungary Budapest,
Russia Moscow, China Beijing, Cuba Havana, Kenya Nairobi, Peru Lima, Ireland Dublin, England London, Thailand Bangkok,
Denmark Copenhagen, Belgium Brussels"""

TOPICS = """rain, the sea, bread, trains, cats, the moon, music, winter, coffee, mountains, bees, football, paper,
chess, gardens, salt, clocks, bridges, horses, books, rivers, cheese, bicycles, the sun"""

TICKETS = {
    "billing": """I was charged twice this month; Please send me the invoice again; My refund has not arrived;
        The price is not what I ordered; Can I pay by bank transfer?; The discount is missing on my bill;
        Why is there a fee on my receipt?; My card was declined""",
    "technical": """The app crashes when I open it; The page stays blank; The export fails with an error;
        Uploads stop at 99 percent; The video has no sound; Search returns nothing; The printer is not found;
        It became very slow after the update""",
    "account": """I cannot log in any more; How do I change my password?; Please delete my profile;
        My email address has changed; Somebody else uses my user name; How do I add a second user?;
        I did not get the confirmation mail; I want to close my account""",
}


def rows(task: str) -> list[dict[str, Any]]:
    """Fields of every row, shuffled; of `calculator` the rows themselves."""
    found = MAKERS[task]()
    random.Random(task).shuffle(found)
    return found


def sums(lowest: int, highest: int) -> list[dict[str, Any]]:
    numbers = range(lowest, highest + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    chosen = random.Random(highest).sample(pairs, min(len(pairs), 100))
    plus = [{"question": f"{a} + {b}", "answer": str(a + b)} for a, b in chosen[::2]]
    return plus + [{"question": f"{a} - {b}", "answer": str(a - b)} for a, b in chosen[1::2]]


def capitals() -> list[dict[str, Any]]:
    return [dict(zip(("country", "city"), pair.split(), strict=True)) for pair in CAPITALS.split(",")]


def topics() -> list[dict[str, Any]]:
    return [{"topic": topic.strip()} for topic in TOPICS.split(",")]


def tickets() -> list[dict[str, Any]]:
    return [
        {"ticket": ticket.strip(), "department": department}
        for department, texts in TICKETS.items()
        for ticket in texts.split(";")
    ]


def calculator() -> list[dict[str, Any]]:
    from benchmarks.tools import questions

    return questions(seed=0, training=60, held_out=0)[0]


MAKERS = {
    "sums": lambda: sums(0, 9),
    "two_digits": lambda: sums(10, 60),
    "few_shot": lambda: [row for row in sums(1, 9) if "+" in row["question"]],
    "capitals": capitals,
    "topics": topics,
    "tickets": tickets,
    "calculator": calculator,
    "safe": lambda: [{"number": number} for number in range(1, 10)],
}
