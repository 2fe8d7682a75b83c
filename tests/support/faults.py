"""Run files with a planted fault, and healthy ones, for a small model that repeats a digit it is asked for."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import tiny

ROWS = [
    {"prompt": [{"role": "user", "content": f"say {digit}"}], "answer": str(digit), "topic": "digits"}
    for digit in range(10)
]
TEXTS = [{**row, "prompt": row["prompt"][0]["content"]} for row in ROWS]
CODE = """
import random
import time
from covey.rewards import completion_text as text_of

def right(completions, answer, **kwargs):
    return [float(text_of(one).strip() == a) for one, a in zip(completions, answer)]

def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text_of(one)) / max(len(text_of(one)), 1) for one in completions]

def brief(completions, **kwargs):
    return [-float(len(text_of(one))) for one in completions]

"""


def repeating_model(folder: Path, steps: int = 130) -> str:
    """Train a model, in a few seconds, that answers "say 7" with "7" about a third of the time, and ends there."""
    tokenizer, rng = tiny.tokenizer(), random.Random(0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny.config(hidden_size=64, intermediate_size=128)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        examples = []
        for row in (rng.choice(ROWS) for _ in range(32)):
            prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            answer = [*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            examples.append((list(prompt) + answer, [-100] * len(prompt) + answer))
        ids, labels = (torch.tensor([pair[which] for pair in examples]) for which in (0, 1))
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / steps)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write(
    folder: Path, model: str, code: str = "", rows: Any = ROWS, funcs: Any = None, play: str = "", **changes: Any
) -> str:
    """A run file; `code` is that of a reward function `f`, and of a rollout function named `play`."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(CODE + code)
    run = {
        "model": model,
        "dataset": str(folder / "rows.jsonl"),
        "reward_funcs": [f"{folder}/rewards.py:{name}" for name in funcs or (["f"] if code else ["right"])],
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 8,
        "max_steps": 16,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "rollout_func": f"{folder}/rewards.py:{play}" if play else None,
        **changes,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump({name: value for name, value in run.items() if value is not None}))
    return str(folder / "run.yaml")


def changed(model: str, folder: Path, change: Any = None, eos: int | None = None) -> str:
    """A copy of the model with another tokenizer or end of sequence."""
    shutil.copytree(model, folder)
    tokenizer = tiny.tokenizer()
    if change is not None:
        (folder / "chat_template.jinja").unlink()
        change(tokenizer)
        tokenizer.save_pretrained(folder)
    if eos is not None:
        settings = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": eos}))
    return str(folder)


def huge(model: str, folder: Path) -> str:
    """A model of 70 billion parameters without its weights."""
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    ).save_pretrained(folder)
    return str(folder)


def _without_opening(tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.partition("{% if add_generation_prompt")[0]


def _without_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None


def _short(tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'][:3]")


def _other_end(tokenizer: Any) -> None:
    tokenizer.eos_token = "<unk>"


def _more_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens([f"word{number}" for number in range(9)])


def _shuffled(values: list[str]) -> list[str]:
    random.Random(3).shuffle(values)
    return values


def _f(body: str, arguments: str = "completions, answer") -> str:
    return f"def f({arguments}, **kwargs):\n    {body}\n"


_SEEN = """SEEN = set()

def f(completions, **kwargs):
    before = set(SEEN)
    SEEN.update(map(str, completions))
    return [float(str(one) not in before) for one in completions]
"""
_EACH = "for one, a in zip(completions, answer)]"
QUICK = (
    "constant",
    "by prompt",
    "by position",
    "random",
    "seen before",
    "raises",
    "no column",
    "none",
    "another case",
    "another column",
    "no opening",
    "long warm-up",
    "rate of an adapter",
    "beta",
)
"""Faults that a random model shows as well."""
FAST = ("no column", "raises", "by position", "long warm-up", "beta")
"""A few of these, in as many stages, that take half a second of CPU or less."""

FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "constant": ("reward-constant", {"code": _f("return [1.0] * len(completions)")}),
    "by prompt": (
        "reward-constant",
        {"code": _f("return [float(len(str(p)[-9:]) + ord(str(p)[-4])) for p in prompts]", "prompts")},
    ),
    "another case": (
        "reward-unreachable",
        {
            "rows": [{**row, "answer": f"Digit {row['answer']}"} for row in ROWS],
            "code": _f("return [float(one[-1]['content'].lower() == a) " + _EACH),
        },
    ),
    "another column": (
        "data-columns",
        {
            "rows": [{**row, "answer": "none", "digit": row["answer"]} for row in ROWS],
            "code": _f("return [float(a.isdigit() and one[-1]['content'] == a) " + _EACH),
        },
    ),
    "swallowed": (
        "reward-constant",
        {
            "code": _f(
                "try:\n        return [float(one.strip() == a) "
                + _EACH
                + "\n    except Exception:\n        return [0.0] * len(answer)"
            )
        },
    ),
    "any text": (
        "reward-saturated",
        {"code": _f("return [float(0 < len(text_of(one)) < 100) for one in completions]")},
    ),
    "any digit": (
        "reward-saturated",
        {"code": _f("return [float(any(c.isdigit() for c in text_of(one))) for one in completions]")},
    ),
    "tags": ("reward-unreachable", {"code": _f("return [float(f'<answer>{a}</answer>' in text_of(one)) " + _EACH)}),
    "line break": ("reward-unreachable", {"code": _f("return [float(text_of(one) == a + '\\n') " + _EACH)}),
    "by position": ("reward-order", {"code": _f("return [float(n % 2) for n in range(len(completions))]")}),
    "first answer": (
        "reward-order",
        {"code": _f("return [float(text_of(one).strip() == answer[0]) for one in completions]")},
    ),
    "neighbour": (
        "reward-order",
        {"code": _f("return [float(text_of(one).strip() == answer[n - 1]) for n, one in enumerate(completions)]")},
    ),
    "seen before": ("reward-order", {"code": _SEEN}),
    "random": ("reward-order", {"code": _f("return [random.random() for one in completions]")}),
    "raises": ("reward-failing", {"code": _f("return [float(one['text'] == a) " + _EACH)}),
    "none": ("reward-failing", {"code": _f("return [None for one in completions]")}),
    "mostly NaN": (
        "reward-failing",
        {"code": _f("return [float('nan') if a < '8' else float(text_of(one) == a) " + _EACH)},
    ),
    "messages for text": ("reward-failing", {"code": _f("return [float(one.strip() == a) " + _EACH)}),
    "hundreds": (
        "reward-scale",
        {"funcs": ["right", "f"], "code": _f("return [-20.0 * sum(map(ord, text_of(one))) for one in completions]")},
    ),
    "long": ("reward-length", {"code": _f("return [float(len(text_of(one))) for one in completions]")}),
    "one prompt": ("signal-sparse", {"code": _f("return [float(text_of(one).strip() == a == '3') " + _EACH)}),
    "pairs": (
        "groups-small",
        {
            "num_generations": 2,
            "per_device_train_batch_size": 16,
            "code": _f("return [float(text_of(one) == a and int(a) % 2 == 0) " + _EACH),
        },
    ),
    "one token": (
        "completions-cut",
        {
            "max_completion_length": 1,
            "code": _f(
                "return [float(ids[-1] == 1 and text_of(one) == a) for ids, one, a in zip(completion_ids, completions,"
                " answer)]",
                "completion_ids, completions, answer",
            ),
        },
    ),
    "one token of a turn": (
        "completions-cut",
        {
            "max_turn_length": 1,
            "play": "play",
            "code": _f(
                "return [float(ids[-1] == 1 and text_of(one) == a) for ids, one, a in zip(completion_ids, completions,"
                " answer)]\n\nasync def play(row, engine):\n    episode = engine.begin()\n    await episode.sample()\n"
                "    return episode.done()",
                "completion_ids, completions, answer",
            ),
        },
    ),
    "other end": ("never-ends", {"change": _other_end, "eos": 3}),
    "end forbidden": ("never-ends", {"generation_kwargs": {"min_tokens": 8}}),
    "end overridden": ("never-ends", {"generation_kwargs": {"eos_token_id": 50}, "max_completion_length": 16}),
    "text": ("template", {"rows": TEXTS}),
    "no opening": ("template", {"change": _without_opening}),
    "no template": ("template", {"change": _without_template}),
    "truncated": ("prompt-round-trip", {"chat_template_kwargs": {"truncation": True, "max_length": 12}}),
    "short": ("prompt-round-trip", {"change": _short}),
    "rendered twice": (
        "prompt-round-trip",
        {
            "rows": [
                {**r, "prompt": [{"role": "user", "content": f"<bos>user: {t['prompt']}<eos>"}]}
                for r, t in zip(ROWS, TEXTS, strict=True)
            ]
        },
    ),
    "unknown characters": (
        "prompt-round-trip",
        {
            "rows": [
                {**r, "prompt": [{"role": "user", "content": f"«é» say {chr(0x660 + n)}"}]} for n, r in enumerate(ROWS)
            ]
        },
    ),
    "more tokens": ("tokenizer-drift", {"change": _more_tokens}),
    "tiny rate": ("learning-rate-low", {"learning_rate": 1e-8}),
    "long warm-up": ("learning-rate-low", {"warmup_steps": 20000}),
    "rate of an adapter": ("learning-rate-low", {"learning_rate": 1e-6, "peft": {"r": 8}}),
    "huge rate": ("learning-rate-high", {"learning_rate": 0.3}),
    "huge rate of an adapter": ("learning-rate-high", {"learning_rate": 5.0, "peft": {"r": 8}}),
    "beta": ("kl-scale", {"beta": 10.0}),
    "beta in the reward": ("kl-scale", {"beta": 5.0, "method": "rloo"}),
    "repetition": ("engine-mismatch", {"repetition_penalty": 3.0}),
    "cold": ("temperature-low", {"temperature": 0.01}),
    "greedy": ("temperature-low", {"top_k": 1}),
    "no column": ("data-columns", {"rows": [{"prompt": row["prompt"]} for row in ROWS]}),
    "one answer": ("data-columns", {"rows": [{**row, "answer": "3"} for row in ROWS]}),
    "next answer": ("data-columns", {"rows": [{**row, "answer": ROWS[n - 1]["answer"]} for n, row in enumerate(ROWS)]}),
    "shuffled answers": (
        "data-columns",
        {
            "rows": [
                {**r, "answer": a}
                for r, a in zip(ROWS * 4, _shuffled([row["answer"] for row in ROWS * 4]), strict=False)
            ]
        },
    ),
    "other name": (
        "data-columns",
        {
            "code": _f(
                "wanted = kwargs.get('solution') or [''] * len(completions)\n"
                "    return [float(text_of(one).strip() == a) for one, a in zip(completions, wanted)]",
                "completions",
            )
        },
    ),
    "huge model": ("memory", {"huge": True}),
}
"""Name: code of the finding, and what differs from the healthy run."""

HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {},
    "rloo with KL": {"method": "rloo", "beta": 0.05, "num_generations": 4},
    "KL in the loss": {"beta": 0.04},
    "adapter": {"peft": {"r": 8}, "learning_rate": 5e-3},
    "masked": {"mask_truncated_completions": True, "max_completion_length": 3},
    "small rate, long run": {"learning_rate": 1e-5, "max_steps": 2000},
    "two rewards": {"funcs": ["right", "digits"]},
    "weighted brevity": {"funcs": ["right", "brief"], "reward_weights": [1.0, 0.01]},
    "cooler": {"temperature": 0.7, "top_p": 0.95},
    "hard": {"code": _f("return [float(text_of(one).strip() == a < '5') " + _EACH)},
}
