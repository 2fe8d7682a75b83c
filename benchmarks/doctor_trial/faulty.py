"""Faulty runs, with the first findings that are right; written before the doctor was asked about any of them.

The mistakes are users', many from trackers of libraries that train with group-relative rewards: patterns that no
completion matches, references that were never extracted, tools that only fail, weights that are put back.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.doctor_trial.cases import GUESS, MODEL, TOOL, Case, Rows, user
from benchmarks.doctor_trial.model import KINDS


def _reward(body: str, arguments: str = "completions, answer", before: str = "") -> str:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").split("\n"))
    return f"{before}\ndef f({arguments}, **kwargs):\n{lines}\n"


def _each(change: Any) -> Rows:
    return lambda rows: [{**row, **change(row)} for row in rows]


def _sorted_answers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers = sorted(row["answer"] for row in rows)
    return [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]


def _permuted(folder: Path) -> None:
    """The characters under other ids, as by a tokenizer of another training."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    characters = [piece for piece in vocabulary if len(piece) == 1]
    moved = [*characters[37:], *characters[:37]]
    ids = [vocabulary[piece] for piece in characters]
    vocabulary.update(zip(moved, ids, strict=True))
    path.write_text(json.dumps(content))


SCRIPT = f'''\
import json

from covey import GRPOConfig, GRPOTrainer
from rewards import right
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

MODEL = "{MODEL}"
args = GRPOConfig(
    output_dir="out", max_steps=12, learning_rate=2e-4, lr_scheduler_type="constant", per_device_train_batch_size=64,
    gradient_accumulation_steps=1, num_generations=8, max_completion_length=32, gradient_checkpointing=False,
    logging_steps=1, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
)
rows = [json.loads(line) for line in open("rows.jsonl")]
'''
TRAIN = """
trainer = GRPOTrainer(
    model=model, processing_class=AutoTokenizer.from_pretrained(MODEL), reward_funcs=right, args=args,
    train_dataset=rows, callbacks=callbacks,
)
trainer.train()
trainer.save_model()
"""

REWARD_CASES = [
    Case(
        "tags over two lines",
        "the pattern's dot does not match the line break between the tags",
        task="tags",
        right=("reward-unreachable",),
        accepts=("signal-sparse", "reward-constant"),
        reward=_reward(
            """
            pattern = r"^<think>.*?</think><answer>.*?</answer>$"
            return [float(re.match(pattern, completion_text(one)) is not None) for one in completions]
            """.replace("            ", ""),
            "completions",
        ),
    ),
    Case(
        "the whole solution as the reference",
        "the answer column holds the working and '#### 7', and the reward compares the completion with all of it",
        task="sums",
        right=("reward-unreachable", "data-columns"),
        accepts=("signal-sparse",),
        rows=_each(lambda row: {"answer": f"We add the two digits and get {row['answer']}.\n#### {row['answer']}"}),
    ),
    Case(
        "a number against text",
        "the answer is a number in the data, and a text never equals it",
        task="sums",
        right=("reward-unreachable",),
        accepts=("reward-constant", "data-columns"),
        rows=_each(lambda row: {"answer": int(row["answer"])}),
        reward=_reward("return [float(completion_text(one).strip() == a) for one, a in zip(completions, answer)]"),
    ),
    Case(
        "the end mark in the pattern",
        "the reward asks for <|im_end|>, which is no part of a completion's text",
        right=("reward-unreachable",),
        accepts=("reward-constant", "signal-sparse"),
        reward=_reward(
            "return [float(completion_text(one) == a + '<|im_end|>') for one, a in zip(completions, answer)]"
        ),
    ),
    Case(
        "a rubric without a match gives full marks",
        "the reference is read by a pattern that the column does not follow, and an unreadable one counts as right",
        right=("reward-constant",),
        accepts=("reward-saturated", "data-columns"),
        reward=_reward(
            "gold = [re.search(r'boxed{(.*)}', a) for a in answer]\n"
            "return [1.0 if g is None else float(g[1] in completion_text(one)) for one, g in zip(completions, gold)]"
        ),
    ),
    Case(
        "answers taken once for a group",
        "the function divides the index by the group's size, as if there were an answer for each prompt only",
        right=("reward-order",),
        accepts=("data-columns",),
        reward=_reward(
            "return [float(completion_text(one).strip() == answer[n // 8]) for n, one in enumerate(completions)]"
        ),
    ),
    Case(
        "the batch's mean for each",
        "the function returns the mean score of the batch for every completion",
        right=("reward-constant", "reward-order"),
        accepts=("signal-sparse",),
        reward=_reward("scores = right(completions, answer)\nreturn [sum(scores) / len(scores)] * len(scores)"),
    ),
    Case(
        "a distance instead of a score",
        "the number of differing characters is returned, which grows with the error",
        right=("reward-sign",),
        reward=_reward(
            "texts = [completion_text(one).strip() for one in completions]\n"
            "return [float(sum(x != y for x, y in zip(t.ljust(30), a.ljust(30)))) for t, a in zip(texts, answer)]"
        ),
    ),
    Case(
        "points for every character",
        "half a point for each character, on top of one for the right answer, to avoid empty answers",
        task="explained",
        right=("reward-length", "reward-repeats"),
        accepts=("reward-scale",),
        reward=_reward(
            "return [last + len(completion_text(one)) / 2 for last, one in zip(last_word(completions, answer),"
            " completions)]"
        ),
    ),
    Case(
        "mentions counted",
        "the more often the right kind is mentioned, the more points",
        right=("reward-repeats",),
        accepts=("reward-length",),
        reward=_reward("return [float(completion_text(one).count(a)) for one, a in zip(completions, answer)]"),
    ),
    Case(
        "safe if short",
        "1 for at most two hundred characters without an apology, which every completion is",
        right=("reward-saturated",),
        accepts=("reward-constant",),
        reward=_reward(
            "texts = [completion_text(one) for one in completions]\n"
            "return [float(len(text) <= 200 and 'sorry' not in text.lower()) for text in texts]",
            "completions",
        ),
    ),
    Case(
        "an allowance of calls",
        "a judge with an allowance: after 300 completions each gets 0, without an error",
        right=("reward-order", "reward-lost"),
        accepts=("reward-constant",),
        reward=_reward(
            "global left\nscores = []\nfor score in right(completions, answer):\n    left -= 1\n"
            "    scores.append(score if left >= 0 else 0.0)\nreturn scores",
            before="left = 300\n",
        ),
    ),
    Case(
        "marks that get stricter",
        "a schedule in the module: each call of the function halves what a right answer is worth",
        right=("reward-order",),
        accepts=("reward-lost",),
        reward=_reward(
            "global worth\nworth /= 2\nreturn [worth * score for score in right(completions, answer)]",
            before="worth = 1.0\n",
        ),
    ),
    Case(
        "two halves that cancel",
        "brevity and detail are both rewarded, with equal weights",
        right=("reward-constant",),
        accepts=("reward-scale", "signal-sparse"),
        run={"reward_funcs": ["rewards.py:brief", "rewards.py:detail"]},
        reward="def brief(completions, **kwargs):\n    return [-len(completion_text(one)) / 9 for one in completions]\n"
        "\n\ndef detail(completions, **kwargs):\n    return [len(completion_text(one)) / 9 for one in completions]\n",
    ),
    Case(
        "style in hundreds",
        "a readability score of up to 206 is added to 1 for the right answer",
        task="explained",
        right=("reward-scale",),
        accepts=("reward-length",),
        run={"reward_funcs": ["rewards.py:last_word", "rewards.py:readable"]},
        reward="def readable(completions, **kwargs):\n    scores = []\n    for one in completions:\n"
        "        words = completion_text(one).split() or ['']\n"
        "        vowels = sum(len(re.findall('[aeiou]+', word)) for word in words)\n"
        "        scores.append(206.8 - 1.0 * len(words) - 84.6 * vowels / len(words))\n    return scores\n",
    ),
]

DATA_CASES = [
    Case(
        "one column sorted",
        "the answers were sorted by themselves, so they belong to other prompts",
        right=("data-columns",),
        accepts=("data-contradicts",),
        rows=_sorted_answers,
    ),
    Case(
        "numbers of classes",
        "the label column holds the class's number, and the reward expects its name",
        right=("reward-unreachable", "data-columns"),
        accepts=("reward-constant", "signal-sparse"),
        rows=_each(lambda row: {"answer": str([*KINDS].index(row["answer"]))}),
    ),
    Case(
        "the question as the assistant's",
        "the question has the role of the assistant, so the model continues it instead of answering",
        right=("template",),
        accepts=("prompt-round-trip", "never-ends", "prompt-empty"),
        rows=_each(lambda row: {"prompt": [{"role": "assistant", "content": row["prompt"][0]["content"]}]}),
    ),
    Case(
        "the question in the system message",
        "the question was put into the system message, and the user's is empty",
        right=("prompt-empty", "template"),
        accepts=("prompt-round-trip",),
        rows=_each(lambda row: {"prompt": user("", row["prompt"][0]["content"])}),
    ),
    Case(
        "one row a thousand times",
        "a join has multiplied one row, and nine of ten prompts are the same",
        right=("data-repeated",),
        rows=lambda rows: [*rows, *[rows[0]] * 9 * len(rows)],
    ),
    Case(
        "trained on the evaluation",
        "the evaluation reads the file that is trained on",
        right=("eval-overlap",),
        run={"eval_dataset": "rows.jsonl", "eval_strategy": "steps", "eval_steps": 6, "num_generations_eval": 1},
    ),
    Case(
        "two annotators",
        "every question is there twice, with two labels",
        right=("data-contradicts",),
        accepts=("data-columns",),
        rows=lambda rows: [*rows, *[{**row, "answer": rows[n - 5]["answer"]} for n, row in enumerate(rows)]],
    ),
    Case(
        "plain text for a chat model",
        "the prompts are text, and the model knows conversations",
        right=("template",),
        accepts=("never-ends",),
        rows=_each(lambda row: {"prompt": row["prompt"][0]["content"]}),
    ),
]

SAMPLING_CASES = [
    Case(
        "12 tokens for an explanation",
        "the answer is at the end of a sentence that needs 45",
        task="explained",
        right=("completions-cut",),
        run={"max_completion_length": 12},
    ),
    Case(
        "the closing tag as a stop text",
        "the stop text is the tag that the reward looks for, and it is not part of the completion",
        task="tags",
        right=("completions-cut",),
        accepts=("reward-unreachable",),
        names="stop",
        run={"generation_kwargs": {"stop": ["</answer>", "</think>"]}},
    ),
    Case(
        "temperature 0.1",
        "the samples of a prompt are all the same",
        right=("temperature-low",),
        run={"temperature": 0.1},
    ),
    Case(
        "no end before 30 tokens",
        "a minimum length, meant for explanations, on one-word answers",
        right=("never-ends", "completions-cut"),
        accepts=("reward-unreachable", "signal-sparse"),
        names="min_tokens",
        run={"generation_kwargs": {"min_tokens": 30}},
    ),
    Case(
        "another training's tokenizer",
        "the tokenizer has the same characters under other ids",
        right=("tokenizer-drift",),
        accepts=("prompt-round-trip",),
        model=_permuted,
    ),
]

TRAINING_CASES = [
    Case(
        "a learning rate of 1",
        "the rate is thousands of times too high",
        right=("learning-rate-high",),
        accepts=("collapse", "reward-lost"),
        run={"learning_rate": 1.0},
    ),
    Case(
        "a learning rate of 1e-10",
        "the weights do not move",
        right=("learning-rate-low",),
        run={"learning_rate": 1e-10},
    ),
    Case(
        "a KL penalty of 50",
        "beta=50 holds the policy where it is",
        right=("kl-scale",),
        run={"beta": 50.0},
    ),
    Case(
        "a weight decay of 2000",
        "every step takes away two fifths of each weight",
        right=("learning-rate-high",),
        accepts=("collapse", "reward-lost"),
        names="weight_decay",
        run={"weight_decay": 2000.0},
    ),
    Case(
        "an entropy bonus of 20",
        "the bonus outweighs the reward, and completions become noise",
        right=("kl-scale", "learning-rate-high", "reward-lost"),
        accepts=("completions-cut",),
        names="entropy_coef",
        run={"entropy_coef": 20.0},
    ),
    Case(
        "all layers frozen but the norms",
        "requires_grad is False for everything but the norms",
        right=("weights-frozen",),
        accepts=("learning-rate-low",),
        script=SCRIPT
        + "model = AutoModelForCausalLM.from_pretrained(MODEL)\nfor name, weight in model.named_parameters():\n"
        "    weight.requires_grad_('model.norm' in name)\ncallbacks = []\n" + TRAIN,
        when=("after",),
    ),
    Case(
        "a callback that restores the weights",
        "an averaging callback copies the weights of the beginning back after each step",
        right=("weights-frozen", "learning-rate-low"),
        script=SCRIPT
        + """\
model = AutoModelForCausalLM.from_pretrained(MODEL)


class Average(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.kept = {name: weight.clone() for name, weight in model.state_dict().items()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.load_state_dict(self.kept)


callbacks = [Average()]
"""
        + TRAIN,
        when=("after",),
    ),
]

ROLLOUT_CASES = [
    Case(
        "a parameter renamed",
        "the tool's parameter is `item` now, and the model calls it with `word`",
        task="tool",
        right=("tools-failing",),
        accepts=("tools-malformed",),
        names="word",
        files={
            "tools.py": TOOL.replace("word: str", "item: str").replace("get(word", "get(item").replace("word:", "item:")
        },
    ),
    Case(
        "a tool that only fails, in words",
        "the service behind the tool is down, and the tool returns that as text",
        task="tool",
        right=("tools-failing",),
        names="unavailable",
        files={
            "tools.py": TOOL.partition("    return")[0]
            + '    return "Error: the dictionary is unavailable, try again later."\n'
        },
    ),
    Case(
        "a tool that raises",
        "the tool reads a file that is not there",
        task="tool",
        right=("tools-failing",),
        files={"tools.py": TOOL.partition("    return")[0] + '    return open("kinds.json").read()\n'},
    ),
    Case(
        "a tool that nobody mentions",
        "the chat template writes no tools, and no completion calls one",
        task="tool",
        right=("tools-unused",),
        run={"tools": ["tools.py:spell"]},
        rows=_each(lambda row: {"prompt": user(f"{len(row['answer'])}+1?"), "answer": str(len(row["answer"]) + 1)}),
        files={
            "tools.py": 'def spell(word: str) -> str:\n    """Spell a word.\n\n    Args:\n        word: The word.\n'
            '    """\n    return " ".join(word)\n'
        },
    ),
    Case(
        "an environment that breaks at the hint",
        "step() raises at every wrong guess",
        task="guess",
        right=("reward-failing", "tools-failing"),
        accepts=("signal-sparse", "reward-unreachable"),
        files={"guess.py": GUESS.replace("int(guess) < self.digit", "int(guess) < self.secret")},
    ),
    Case(
        "an environment that forgets its state",
        "step() compares with a digit that reset() never sets",
        task="guess",
        right=("reward-unreachable", "reward-constant"),
        accepts=("signal-sparse",),
        files={"guess.py": GUESS.replace("guess == str(self.digit)", "guess == str(self)")},
    ),
]

REAL_CASES = [
    Case(
        "JSON that is never written",
        "the reward reads JSON with a key, and the prompt does not ask for it",
        task="orders",
        right=("reward-unreachable",),
        accepts=("signal-sparse",),
        names="example",
        reward="import json\nimport re\n\n\ndef f(completions, order, **kwargs):\n    scores = []\n"
        "    for one, wanted in zip(completions, order):\n"
        "        found = re.search(r'\\{.*\\}', one[-1]['content'])\n        try:\n"
        "            scores.append(float(json.loads(found[0])['order'] == wanted))\n"
        "        except (TypeError, ValueError, KeyError):\n            scores.append(0.0)\n    return scores\n",
        run={"max_completion_length": 24},
    ),
    Case(
        "a CSV without a system prompt",
        "the texts of the CSV are continued instead of answered",
        task="orders",
        right=("template",),
        accepts=("never-ends", "reward-unreachable"),
        rows=_each(lambda row: {"prompt": row["prompt"][-1]["content"] + " What is the order number?"}),
        run={"max_completion_length": 24},
    ),
]

FAULTY = [*REWARD_CASES, *DATA_CASES, *SAMPLING_CASES, *TRAINING_CASES, *ROLLOUT_CASES, *REAL_CASES]
assert len({case.name for case in FAULTY}) == len(FAULTY) and all(case.right for case in FAULTY)
