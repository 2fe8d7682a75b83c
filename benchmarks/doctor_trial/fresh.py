"""Runs that were written after the doctor had been repaired by the others, before it was asked about any of them."""

import re
from typing import Any

from benchmarks.doctor_trial.cases import GUESS, Case, user
from benchmarks.doctor_trial.model import WORDS

NOISY = """\
import random


def f(completions, answer, **kwargs):
    return [score + random.gauss(0, 3) for score in right(completions, answer)]
"""
CLOCK = """\
import time


def f(completions, answer, **kwargs):
    worth = 1.0 if time.time_ns() // 1000 % 2 else 0.3
    return [worth * score for score in right(completions, answer)]
"""
BRIEF = """\
def f(completions, answer, **kwargs):
    texts = [completion_text(one) for one in completions]
    return [score - 3 * len(text) for score, text in zip(right(completions, answer), texts)]
"""
COUNTED = '''\
KINDS = {words}


def kind_of(word: int) -> str:
    """Look up what kind of thing a word is.

    Args:
        word: The number of the word.
    """
    return KINDS[word]
'''


def _changed(**columns: Any) -> Any:
    return lambda rows: [{**row, **{name: change(row) for name, change in columns.items()}} for row in rows]


FRESH_FAULTY = [
    Case(
        "labels with a capital and a space",
        "the label column has 'Animal ', and the reward compares exactly",
        right=("reward-unreachable",),
        accepts=("data-columns", "reward-constant"),
        rows=_changed(answer=lambda row: row["answer"].capitalize() + " "),
        reward="def f(completions, answer, **kwargs):\n"
        "    return [float(completion_text(one).strip() == a) for one, a in zip(completions, answer)]\n",
    ),
    Case(
        "a space as a stop text",
        "every explanation is cut after its first word",
        task="explained",
        right=("completions-cut",),
        accepts=("reward-unreachable",),
        names="stop",
        run={"generation_kwargs": {"stop": [" "]}},
    ),
    Case(
        "a nucleus of 5%",
        "top_p=0.05 leaves one token at almost every place",
        right=("temperature-low",),
        run={"top_p": 0.05},
    ),
    Case(
        "a judge that is mostly noise",
        "the noise is three times as large as the score",
        right=("reward-order",),
        reward=NOISY,
    ),
    Case(
        "worth by the clock",
        "a right answer is worth 1 or 0.3, by the time at which it is scored",
        right=("reward-order",),
        reward=CLOCK,
    ),
    Case(
        "question and answer exchanged",
        "the columns are exchanged: the prompt is the kind, and the answer the question",
        right=("data-columns", "reward-unreachable"),
        accepts=("signal-sparse", "template"),
        rows=lambda rows: [{"prompt": user(row["answer"]), "answer": row["prompt"][0]["content"]} for row in rows],
    ),
    Case(
        "plain SGD at a rate for Adam",
        "the optimizer has no scale of its own, and the rate is one for Adam",
        right=("learning-rate-low",),
        run={"optim": "sgd", "learning_rate": 1e-6},
    ),
    Case(
        "a tool that wants a number",
        "the tool's parameter is a number, and the model gives the word",
        task="tool",
        right=("tools-failing",),
        names="word",
        files={"tools.py": COUNTED.format(words=[*WORDS.values()])},
    ),
    Case(
        "three tokens, and what is cut is masked",
        "no completion ends, so that none is in the loss",
        right=("completions-cut",),
        run={"max_completion_length": 3, "mask_truncated_completions": True},
    ),
    Case(
        "nothing but brevity",
        "three points off for each character, next to one for the right answer",
        task="explained",
        right=("reward-length", "reward-scale", "reward-sign"),
        reward=BRIEF,
    ),
    Case(
        "a column that was never filled in",
        "the placeholder stands in all prompts, and the answers differ",
        right=("data-contradicts", "data-columns"),
        accepts=("prompt-round-trip",),
        rows=_changed(prompt=lambda row: user("kind of {word}?")),
    ),
    Case(
        "a penalty of 20 in the reward",
        "RLOO with a KL penalty that leaves no room",
        right=("kl-scale",),
        run={"method": "rloo", "beta": 20.0},
    ),
    Case(
        "pairs on a task that rarely succeeds",
        "groups of two on sums, most of which are wrong",
        task="sums",
        right=("groups-small", "signal-sparse"),
        run={"num_generations": 2, "per_device_train_batch_size": 32},
    ),
    Case(
        "prompts cut where the data were made",
        "the text was cut after ten characters, and most words are incomplete",
        right=("prompt-round-trip",),
        accepts=("data-contradicts", "data-columns"),
        rows=_changed(prompt=lambda row: user(re.sub(r"\?", "", row["prompt"][0]["content"])[:10])),
    ),
]

FRESH_HEALTHY = [
    Case("whole sequences", "GSPO", run={"importance_sampling_level": "sequence"}),
    Case("a nucleus of 95%", "a usual setting", run={"top_p": 0.95}),
    Case(
        "a negative weight",
        "a function that counts errors, with a weight below zero",
        run={"reward_funcs": ["rewards.py:f"], "reward_weights": [-1.0]},
        reward="def f(completions, answer, **kwargs):\n"
        "    return [1.0 - score for score in right(completions, answer)]\n",
    ),
    Case(
        "a stop text after the answer",
        "the closing tag ends the completion, and the reward does not need it",
        task="tags",
        run={"generation_kwargs": {"stop": ["</answer>"]}},
        reward="def f(completions, answer, **kwargs):\n"
        "    found = [re.search(r'<answer>(\\w+)', completion_text(one)) for one in completions]\n"
        "    return [float(one is not None and one[1] == a) for one, a in zip(found, answer)]\n",
    ),
    Case(
        "an environment with two tries",
        "fewer hints",
        task="guess",
        files={"guess.py": GUESS.replace("self.left = digit, 4", "self.left = digit, 2")},
    ),
    Case(
        "few rows",
        "six questions, several times",
        rows=lambda rows: rows[:6],
        run={"per_device_train_batch_size": 32},
    ),
]
