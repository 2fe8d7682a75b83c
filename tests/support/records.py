"""Records of runs that never were: real files with all columns, of any size, in seconds."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from covey.algorithms import grpo
from covey.core.batch import collate
from covey.core.records import FinishReason, PromptSample, Rollout, RolloutBatch
from covey.observability.record import Recorder
from covey.observability.record_files import FOLDER, files, read_rows
from tests.support import runs, tiny

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "\x1b[31mred\x1b[0m \x07\x9b2J",
    "\u202egnp.exe\u202c \u2066isolated\u2069 \u200bzero",
    "half \ud800 a pair",
    "&lt;b&gt; {{7*7}} ${7*7} javascript:alert(1) </textarea></style><svg/onload=alert(1)>",
    "السلام عليكم و 你好 👩‍👩‍👧",
)


def state(step: int) -> Any:
    """The trainer's state, as callbacks get it."""
    return SimpleNamespace(global_step=step)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Rollouts of the last rollout batch that a run has on record."""
    return read_rows(files(folder / FOLDER)[-1])


def write(
    folder: Path, steps: int = 16, prompts: int = 8, size: int = 8, length: int = 128, seed: int = 0, **changes: Any
) -> dict[str, Any]:
    """Record `steps` of groups of `size`; returns where the largest gap is, and the longest rollout.

    `changes`: fields of the config, and `hostile=True` for completions that attack the page, `long=N` for a last one of
    N tokens, `tools=True` for some with tool results, `tokens=False` for rollouts alone.
    """
    parts = {name: changes.pop(name, default) for name, default in (("hostile", False), ("long", 0), ("tools", False))}
    tokens = changes.pop("tokens", True)
    chance, tokenizer = random.Random(seed), tiny.tokenizer()
    generator = torch.Generator().manual_seed(seed)
    config = runs.config(folder, **changes)
    objective = grpo.algorithm(config).objective
    described = {
        "settings": {name: repr(value) for name, value in config.to_dict().items()},
        "dataset": {"rows": "40"},
        "rewards": {"right": "a1", "brief": "b2"},
        "model": {"path": "tiny"},
        "engine": {"shares_policy": False, "reports_after_cut": False},
    }
    recorder = Recorder(folder / FOLDER, ["right", "brief"], lambda: described, tokens=tokens, tokenizer=tokenizer)
    largest: tuple[float, str, int] = (0.0, "", 0)
    for step in range(steps):
        scored = _rollout_batch(chance, tokenizer, step, prompts, size, length, parts, last=step == steps - 1)
        batch = collate(scored.rollouts)
        engine = batch.engine_logprobs
        noise = torch.randn(batch.num_tokens, generator=generator)
        batch.old_logprobs = (engine + 0.003 * noise - 0.2 * (noise > 3.2) * noise).clamp(max=-1e-6)
        batch.ref_logprobs = engine + 0.02 * noise.roll(1)
        rewards = scored.rewards.sum(1).view(prompts, size)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        batch.advantages = advantages.flatten().repeat_interleave(batch.lengths)
        batch.weights = batch.sampled / batch.sampled.sum()
        batch = recorder.add(step + 1, step, scored, batch)
        if recorder.updates is not None:
            moved = batch.old_logprobs + 0.12 * noise.roll(2)
            recorder.updates.on_micro_batch(batch, moved, None, objective)
        recorder.on_step_end(config, state(step + 1), None)
        recorder.on_log(config, state(step + 1), None, _metrics(chance, step, steps))
        gaps = torch.where(batch.sampled, (batch.old_logprobs - engine).abs(), 0.0)
        at = int(gaps.argmax())
        row = int((batch.lengths.cumsum(0) <= at).sum())
        if float(gaps[at]) > largest[0]:
            largest = (float(gaps[at]), f"{step}.0.{row}", at - int(batch.lengths[:row].sum()))
    recorder.on_train_end(config, state(steps), None)
    return {"gap": largest, "last": f"{steps - 1}.0.{prompts * size - 1}"}


def _rollout_batch(
    chance: random.Random, tokenizer: Any, step: int, prompts: int, size: int, length: int, parts: dict, last: bool
) -> RolloutBatch:
    draws, rollouts, rewards = [], [], []
    skill = 0.2 + 0.6 / (1 + math.exp(4 - step / 2))
    for group in range(prompts):
        row = {
            "prompt": f"What is {step + group} + {group}? Answer with the number only.",
            "answer": str(step + 2 * group),
        }
        start = tokenizer.encode(f"the answer is {group}", add_special_tokens=False)
        for sample in range(size):
            long = parts["long"] if parts["long"] and last and (group, sample) == (prompts - 1, size - 1) else 0
            count = long or max(4, int(chance.gauss(length, length / 4)))
            ids = [*start, *(chance.randrange(4, len(tokenizer)) for _ in range(count - len(start)))]
            text: Any = tokenizer.decode(ids)
            if parts["hostile"]:
                text = HOSTILE[(step + sample) % len(HOSTILE)]
                ids = tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False) or ids
            sampled = [True] * len(ids)
            ends: list[int] = []
            if parts["tools"] and sample % 3 == 0 and len(ids) > 30:
                middle = slice(len(ids) // 3, 2 * len(ids) // 3)
                sampled[middle] = [False] * (middle.stop - middle.start)
                ends = [middle.start - 1, len(ids) - 1]
                call = {"type": "function", "function": {"name": "add", "arguments": {"a": step, "b": group}}}
                text = [
                    {"role": "assistant", "content": text[:20], "tool_calls": [call]},
                    {"role": "tool", "name": "add", "content": text[20:40]},
                    {"role": "assistant", "content": text[40:]},
                ]
            right = float(chance.random() < (skill if group % 4 else 0.0))
            logprobs = [-chance.expovariate(1.2) if one else 0.0 for one in sampled]
            finish = FinishReason.STOP if chance.random() < 0.8 else FinishReason.LENGTH
            rollouts.append(
                Rollout(
                    tokenizer.encode("What is", add_special_tokens=False),
                    *(ids, sampled, logprobs, text, finish, group),
                    entropies=[chance.expovariate(1.0) for _ in ids],
                    versions=[step - (i < len(ids) // 2 and step > 0) for i in range(len(ids))],
                    turn_ends=ends,
                    seconds=chance.random(),
                )
            )
            draws.append(PromptSample(row, group + prompts * (step % 5), sample))
            rewards.append([right, max(0.0, 1 - len(ids) / (2 * length)) if group % 4 else 0.0])
    return RolloutBatch(draws, rollouts, torch.tensor(rewards), {}, [{} for _ in rollouts])


def _metrics(chance: random.Random, step: int, steps: int) -> dict[str, float]:
    phases = {"phase/sample": 2.1, "phase/score": 0.4, "phase/train": 1.7, "phase/reward": 0.1, "phase/save": 0.05}
    timed = {name: seconds * chance.uniform(0.8, 1.2) for name, seconds in phases.items()}
    rate = 1e-6 * min(1, (step + 1) / 4) * (1 - step / steps / 2)
    return {"loss": chance.gauss(0, 0.05), "grad_norm": chance.uniform(0.4, 1.4), "learning_rate": rate, **timed}
