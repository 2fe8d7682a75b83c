"""`covey init`: data, rewards and a run file as a folder that trains at once, the latter two as in docs/start.md.

The data are made here: messages of customers that name an order, and other numbers that are none.
"""

import argparse
import csv
import io
import random
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from covey.runtime.files import shipped

FILES = ("tickets.csv", "rewards.py", "run.yaml")
ROWS = 300

MESSAGES = (
    "I was charged twice for order {order}.",
    "Order {order} has not arrived yet, and I paid {euros} euros for it.",
    "Please cancel order {order}, I bought the wrong {thing}.",
    "The {thing} of my order {order} arrived broken.",
    "I ordered {count} {thing}s for {euros} euros (order {order}) and got one.",
    "My order {order} came {count} days late.",
    "Can you send me the invoice for {order} again? It was {euros} euros.",
    "Where is my {thing}? I ordered it {count} days ago, the number is {order}.",
    "You sent {count} {thing}s, but {order} was for one {thing}.",
    "My card was charged {euros} euros for {order}, which I have sent back.",
)
THINGS = ("lamp", "chair", "mug", "shirt", "book", "bag", "clock", "kettle")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="covey init", description=f"Write {', '.join(FILES)} into a folder: a run that works, to be changed."
    )
    parser.add_argument("folder", nargs="?", default=".", help="made if it is missing; this folder if not given")
    folder = Path(parser.parse_args(list(argv)).folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file. Name a folder.")
    if there := [name for name in FILES if (folder / name).exists()]:
        held = f"{str(folder)!r} holds {', '.join(there)} already"
        raise ValueError(f"{held}, and nothing was written. Name a new folder: `covey init NAME`.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents().items():
        (folder / name).write_text(content, encoding="utf-8")
        print(folder / name)
    enter = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"\nNext:\n  {enter}covey explain run.yaml    # what will this run do?\n  covey grpo --config run.yaml")
    return 0


def contents() -> dict[str, str]:
    page = shipped("docs/start.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    return {"tickets.csv": tickets(), **{name: shown[name] for name in FILES[1:]}}


def tickets() -> str:
    """A CSV of messages and the number of the order that each is about; the same at every call."""
    draw, text = random.Random(0), io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("text", "order"))
    for _ in range(ROWS):
        order = draw.randint(10_000, 99_999)
        message, thing = draw.choice(MESSAGES), draw.choice(THINGS)
        euros, count = draw.randint(10, 99), draw.randint(2, 9)
        table.writerow((message.format(order=order, thing=thing, euros=euros, count=count), order))
    return text.getvalue()
