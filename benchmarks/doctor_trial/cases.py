"""What a case is, the tasks that cases change, and the folders that they stand for.

A case names the codes that are right as a first finding before any of them is diagnosed. To add one, add it to
`faulty.py` or `healthy.py`.
"""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.doctor_trial.model import DIGITS, KINDS, WORDS
from covey_tools.init import tickets

MODEL = "$model"
Rows = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """A run of a user.

    Attributes:
        name: of the case; no two are alike.
        about: what is wrong, or what is particular to a healthy run, in a sentence.
        task: the healthy run that it changes, a key of `TASKS`.
        right: codes of a first finding that name the cause; none for a healthy run.
        accepts: codes that name a part of it, or a consequence from which a user finds the cause.
        names: text that a right finding holds in its evidence, fix or proof, where the code alone is not enough.
        run: settings of the run file; None removes one.
        reward: code of the reward function `f`; else the task's own.
        files: further files, by name.
        rows: changes the task's rows.
        script: a training script, which is run in place of the run file; diagnosed from its record alone.
        model: a change of the model's folder.
        when: what is diagnosed: the run file "before" the run, and the record "after" it.
    """

    name: str
    about: str
    task: str = "kinds"
    right: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    names: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    reward: str = ""
    files: dict[str, str] = field(default_factory=dict)
    rows: Rows | None = None
    script: str = ""
    model: Callable[[Path], None] | None = None
    when: tuple[str, ...] = ("before", "after")

    @property
    def faulty(self) -> bool:
        return bool(self.right)

    @property
    def settings(self) -> dict[str, Any]:
        run = {**SETTINGS, **TASKS[self.task].run, **self.run}
        if self.reward:
            run["reward_funcs"] = self.run.get("reward_funcs", ["rewards.py:f"])
        return {key: value for key, value in run.items() if value is not None}

    @property
    def data(self) -> list[dict[str, Any]]:
        rows = [dict(row) for row in TASKS[self.task].rows]
        return self.rows(rows) if self.rows is not None else rows

    @property
    def digest(self) -> str:
        """Changes with the case, so that a result of an earlier version of it does not count."""
        told = {key: value for key, value in asdict(self).items() if key not in ("rows", "model")}
        return hashlib.sha256(json.dumps([told, self.settings, self.data, REWARDS]).encode()).hexdigest()[:12]

    def write(self, folder: Path, model: Path, changes: dict[str, Any] | None = None) -> None:
        """Write run.yaml, rows.jsonl, rewards.py and the other files, with settings changed."""
        folder.mkdir(parents=True)
        if self.model is not None:
            model = _copy(model, folder / "model")
            self.model(model)
        run = {**self.settings, **(changes or {})}
        run = {key: str(model) if value == MODEL else value for key, value in run.items()}
        rows = "".join(json.dumps(row) + "\n" for row in self.data)
        files = {
            "rows.jsonl": rows,
            "rewards.py": REWARDS,
            "run.yaml": yaml.safe_dump(run, sort_keys=False),
            **TASKS[self.task].files,
            **self.files,
        }
        files["rewards.py"] += self.reward
        if self.script:
            files["train.py"] = self.script.replace(MODEL, str(model))
        for name, content in files.items():
            (folder / name).write_text(content)


def _copy(source: Path, folder: Path) -> Path:
    """The model's folder with links to its weights."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@dataclass(frozen=True)
class Task:
    """A healthy run: settings, rows and files beyond those of all."""

    run: dict[str, Any]
    rows: Sequence[dict[str, Any]]
    files: dict[str, str] = field(default_factory=dict)


SETTINGS: dict[str, Any] = {
    "model": MODEL,
    "dataset": "rows.jsonl",
    "output_dir": "out",
    "reward_funcs": ["rewards.py:right"],
    "max_steps": 12,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_completion_length": 32,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
}
"""Of every run with the small model."""

REWARDS = '''\
import re

from covey.rewards import completion_text


def right(completions, answer, **kwargs):
    """1 for the right answer and nothing else."""
    return [float(completion_text(one).strip() == str(wanted)) for one, wanted in zip(completions, answer)]


def named(completions, answer, **kwargs):
    """1 for the right answer and nothing else, a half for a sentence that names it."""
    texts = [completion_text(one).strip() for one in completions]
    return [1.0 if text == wanted else 0.5 * (wanted in text) for text, wanted in zip(texts, answer)]


def tagged(completions, answer, **kwargs):
    """1 for the right answer in tags, a fifth for tags."""
    scores = []
    for one, wanted in zip(completions, answer):
        found = re.search(r"<answer>(.*?)</answer>", completion_text(one), re.DOTALL)
        scores.append(0.0 if found is None else 1.0 if found[1].strip() == wanted else 0.2)
    return scores


def last_word(completions, answer, **kwargs):
    """1 where the explanation ends with the right kind."""
    texts = [completion_text(one).strip().rstrip(".") for one in completions]
    return [float(text.endswith(" " + wanted)) for text, wanted in zip(texts, answer)]


'''


def user(text: str, system: str = "") -> list[dict[str, str]]:
    asked = [{"role": "user", "content": text}]
    return [{"role": "system", "content": system}, *asked] if system else asked


def kinds(system: str = "") -> list[dict[str, Any]]:
    words = sorted(WORDS, key=lambda word: hashlib.sha256(word.encode()).hexdigest())
    return [{"prompt": user(f"kind of {word}?", system), "answer": WORDS[word]} for word in words]


def sums() -> list[dict[str, Any]]:
    pairs = [(first, second) for first in range(DIGITS) for second in range(DIGITS)]
    pairs.sort(key=lambda pair: hashlib.sha256(str(pair).encode()).hexdigest())
    return [{"prompt": user(f"{a}+{b}?"), "answer": str(a + b)} for a, b in pairs]


def lines() -> list[dict[str, Any]]:
    begin = "Q: kind of oak?\nA: plant\nQ: kind of cat?\nA: animal\n"
    return [{"prompt": f"{begin}Q: kind of {word}?\nA:", "answer": kind} for word, kind in WORDS.items()]


def orders() -> list[dict[str, Any]]:
    asked = "What is the order number? Answer with the number only."
    rows = csv.DictReader(io.StringIO(tickets()))
    return [{"prompt": user(row["text"], asked), "order": int(row["order"])} for row in rows]


TOOL = (
    """\
KINDS = """
    + json.dumps(WORDS)
    + '''


def kind_of(word: str) -> str:
    """Look up what kind of thing a word is.

    Args:
        word: The word.
    """
    return KINDS.get(word, "unknown")
'''
)

GUESS = '''\
class Guess:
    """A digit to be found, with hints."""

    def reset(self, digit, **row):
        self.digit, self.left = digit, 4

    def step(self, text):
        self.left -= 1
        guess = text.strip()
        if guess == str(self.digit):
            return "right", 1.0, True, {}
        hint = "higher" if guess.isdigit() and int(guess) < self.digit else "lower"
        return hint, 0.0, self.left == 0, {}
'''

TASKS: dict[str, Task] = {
    "kinds": Task({}, kinds()),
    "sums": Task({"max_completion_length": 8}, sums()),
    "tags": Task({"reward_funcs": ["rewards.py:tagged"], "max_completion_length": 64}, kinds("Use tags.")),
    "explained": Task({"reward_funcs": ["rewards.py:last_word"], "max_completion_length": 64}, kinds("Explain.")),
    "lines": Task({"generation_kwargs": {"stop": ["\n"]}, "max_completion_length": 12}, lines()),
    "tool": Task(
        {"tools": ["tools.py:kind_of"], "reward_funcs": ["rewards.py:after_all"], "max_completion_length": 200},
        kinds(),
        {
            "tools.py": TOOL,
            "rewards.py": REWARDS + "\n\ndef after_all(completions, answer, **kwargs):\n"
            '    """1 where the last message is the right answer."""\n'
            "    last = [one[-1]['content'].strip() for one in completions]\n"
            "    return [float(text == wanted) for text, wanted in zip(last, answer)]\n",
        },
    ),
    "guess": Task(
        {"environment_factory": "guess.py:Guess", "reward_funcs": None, "max_completion_length": 64},
        [{"prompt": user("Begin.", "Guess a digit."), "digit": digit} for digit in range(10)],
        {"guess.py": GUESS},
    ),
    "orders": Task(  # of the first hour, with the real model
        {
            "learning_rate": 2e-5,
            "max_steps": 3,
            "per_device_train_batch_size": 16,
            "max_completion_length": 12,
            "temperature": 0.7,
            "reward_funcs": ["rewards.py:has_number"],
        },
        orders(),
        {
            "rewards.py": "import re\n\nfrom covey.rewards import completion_text\n\n\n"
            "def has_number(completions, order, **kwargs):\n"
            "    found = [re.findall(r'\\d+', completion_text(one)) for one in completions]\n"
            "    return [float(one == [str(order)]) + 0.2 * (str(order) in one)"
            " for one, order in zip(found, order)]\n",
        },
    ),
}
REAL = ("orders",)
"""Tasks of SmolLM2-135M-Instruct."""
assert set(WORDS.values()) == set(KINDS)
