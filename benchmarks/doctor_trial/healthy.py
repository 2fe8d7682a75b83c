"""Healthy runs: settings, rewards and data as users have them, in which the doctor should find nothing."""

from benchmarks.doctor_trial.cases import Case
from benchmarks.doctor_trial.faulty import SCRIPT, TRAIN

OVERLAP = """\
from difflib import SequenceMatcher


def f(completions, answer, **kwargs):
    texts = [completion_text(one).strip() for one in completions]
    return [SequenceMatcher(None, text, wanted).ratio() for text, wanted in zip(texts, answer)]
"""
OF_ITS_OWN = """\
def f(completions, answer, **kwargs):
    texts = [completion_text(one).strip() for one in completions]
    return [float(text == wanted) if wanted.isalpha() else None for text, wanted in zip(texts, answer)]


def digits(completions, answer, **kwargs):
    texts = [completion_text(one).strip() for one in completions]
    return [float(text == wanted) if wanted.isdigit() else None for text, wanted in zip(texts, answer)]
"""
SIGNED = """\
def f(completions, answer, **kwargs):
    return [2 * score - 1 for score in right(completions, answer)]
"""
LONG = """\
def f(completions, answer, **kwargs):
    texts = [completion_text(one) for one in completions]
    scores = right(completions, answer)
    return [score - 0.2 * (len(text) > 20) for score, text in zip(scores, texts)]
"""
ASYNC = """\
import asyncio


async def f(completions, answer, **kwargs):
    await asyncio.sleep(0.01)
    return right(completions, answer)
"""
CACHED = """\
import functools


@functools.lru_cache
def judged(text, wanted):
    return float(text == wanted)


def f(completions, answer, **kwargs):
    return [judged(completion_text(one).strip(), wanted) for one, wanted in zip(completions, answer)]
"""
WATCHED = (
    SCRIPT
    + """\
model = AutoModelForCausalLM.from_pretrained(MODEL)


class Watch(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in (logs or {}):
            print(state.global_step, logs["reward"])


callbacks = [Watch()]
"""
    + TRAIN
)

HEALTHY = [
    Case("exact answers", "1 for the right word"),
    Case("one-digit sums", "more rows, and numbers", task="sums"),
    Case("partial credit", "a half for a sentence that names the answer", run={"reward_funcs": ["rewards.py:named"]}),
    Case("tags", "partial credit for the form", task="tags"),
    Case("explanations", "the answer at the end of a sentence, with room for it", task="explained"),
    Case("continued examples", "plain text with a stop text at the end of the line", task="lines"),
    Case("a small KL penalty", "beta=0.04", run={"beta": 0.04}),
    Case("RLOO", "the other method", task="sums", run={"method": "rloo"}),
    Case("without scaling", "dr_grpo with groups of four", run={"loss_type": "dr_grpo", "num_generations": 4}),
    Case(
        "an adapter",
        "LoRA at ten times the rate",
        run={"peft": {"r": 8, "target_modules": "all-linear"}, "learning_rate": 2e-3},
    ),
    Case("temperature 0.8", "a little less noise", run={"temperature": 0.8}),
    Case("a graded reward", "similarity between 0 and 1", reward=OVERLAP),
    Case(
        "two tasks",
        "each function abstains on the other's rows",
        reward=OF_ITS_OWN,
        run={"reward_funcs": ["rewards.py:f", "rewards.py:digits"]},
        rows=lambda rows: [
            row
            for n, one in enumerate(rows)
            for row in (
                one,
                {"prompt": [{"role": "user", "content": f"{n % 5}+{n // 5}?"}], "answer": str(n % 5 + n // 5)},
            )
        ],
    ),
    Case("rewards below zero", "1 and -1", reward=SIGNED),
    Case("a bounded penalty for length", "a fifth off for more than a word", reward=LONG),
    Case("an async reward", "a service that answers in 10 ms", task="sums", reward=ASYNC),
    Case("a reward with a cache", "a memory that changes nothing", reward=CACHED),
    Case("two updates of a batch", "num_iterations=2", run={"num_iterations": 2}),
    Case(
        "held-out rows",
        "an evaluation on the first rows",
        task="sums",
        run={
            "dataset_split": "train[6:]",
            "eval_dataset": {"held": {"dataset": "rows.jsonl", "split": "train[:6]", "num_generations": 1}},
            "eval_strategy": "steps",
            "eval_steps": 6,
        },
    ),
    Case("a tool", "the tool answers, and two of three completions call it", task="tool"),
    Case("an environment", "a digit to guess with hints", task="guess"),
    Case("a script with a callback", "a training script that prints the reward", script=WATCHED, when=("after",)),
    Case("the first hour", "the real model on orders", task="orders"),
]
assert len({case.name for case in HEALTHY}) == len(HEALTHY) and not any(case.faulty for case in HEALTHY)
