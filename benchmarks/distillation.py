"""Distillation from a teacher: how fast a policy learns a task from it, and whether it keeps another task meanwhile.

    python -m benchmarks.distillation --part demo --seeds 0 1 2 3     # the demo's task, SmolLM2-135M-Instruct
    python -m benchmarks.distillation --part tasks --seeds 0 1 2 3    # two tasks, a tiny Llama
    python -m benchmarks.distillation --summary                       # tables of the records

*demo*: the teacher is the demo's own result, that of the arm with rewards for seed 0. Four arms start from the same
model with the demo's settings and learn from 64 completions a step: rewards; the divergence from the teacher by the
sampled token; the divergence over the policy's 8 likeliest tokens and the rest; fine-tuning on answers that the teacher
samples. The figures are what a run has spent when its held-out accuracy first reaches 60%, on straight lines between
the evaluations: steps, sampled tokens, operations (`flops.py`) and processor seconds.

*tasks*: a tiny Llama knows one task (to reverse a word), and copies an answer that its prompt shows. It learns a second
task (each letter's successor) without the answer in the prompt, from itself with the answer there: by self-distillation
on its own completions, or by fine-tuning on the answers that the shown prompt gives. Each is tried on rows of the new
task alone, and with as many rows of the old one, whose teacher reads their own prompt. The figures are the accuracies
on both tasks, before, when 90% of the new task are right, and at the end, and the lowest on the old one.

Every run is one record; runs on record are not run again. Clocks count processor seconds, evaluations excluded.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from benchmarks.letters import tiny_llama, tokenizer, vocabulary_of
from benchmarks.machine import describe, model_path
from benchmarks.records import Records
from covey import GRPOConfig, GRPOTrainer
from covey.sizing.step_cost import ModelSize, forward_flops

HERE = Path(__file__).parent
QUANTITIES = ("steps", "tokens", "flops", "seconds")
TARGET = 0.6
T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}  # 97.5%, by degrees of freedom


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    records = Records(options.records)
    if not options.summary:
        arms, train = (DEMO_ARMS, demo_run) if options.part == "demo" else (TASK_ARMS, task_run)
        for seed, arm in itertools.product(options.seeds, options.arms or arms):
            known = {"part": options.part, "arm": arm, "seed": seed}
            if not records.find(**known):
                found = train(arm, seed, options)
                records.add(**known, **found, machine=describe(options.threads))
                print(known, {name: value for name, value in found.items() if name != "curve"}, flush=True)
    print(demo_table(records.find(part="demo")))
    print(task_table(records.find(part="tasks")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.distillation", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=("demo", "tasks"), default="tasks")
    parser.add_argument("--arms", nargs="+", help="some of the part's arms; all if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, help="most optimizer steps; 24 of the demo's task, 80 of the two tasks")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the two tasks; the demo has its own")
    parser.add_argument("--samples", type=int, default=1, help="completions of each of the demo's 80 held-out prompts")
    parser.add_argument("--every", type=int, default=2, help="steps of the demo from one evaluation to the next")
    parser.add_argument("--teacher-steps", type=int, default=16, help="of the demo's teacher; 16 are the demo's own")
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"), help="of the teacher's weights")
    parser.add_argument("--records", type=Path, default=HERE / "distillation.jsonl")
    parser.add_argument("--summary", action="store_true", help="train nothing; only print the tables")
    return parser


# ---- the demo's task -------------------------------------------------------------------------------------------------

DEMO_ARMS: dict[str, dict[str, Any]] = {
    "rewards": {},
    "sampled token": {"teacher_loss": "divergence"},
    "8 tokens": {"teacher_loss": "divergence", "teacher_top_k": 8},
    "fine-tuning": {},
}
TEACHER_SEED = 0
RATE, WARMUP, GROUP, GROUPS = 2e-5, 2, 8, 8  # the demo's


@dataclass
class Spent:
    """Costs of a run so far, and held-out accuracy by what it had cost."""

    size: ModelSize
    evaluate: Callable[[], float]
    every: int  # steps from one evaluation to the next
    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    _since: float = 0.0

    def add(self, groups: Sequence[tuple[int, list[int]]], passes: Sequence[float]) -> None:
        """Costs of groups (tokens of the prompt, of each completion), each in so many forward passes."""
        self.tokens += sum(sum(lengths) for _, lengths in groups)
        costs = (forward_flops(self.size, prompt, lengths) for prompt, lengths in groups)
        self.flops += round(sum(number * cost for number, cost in zip(passes, costs, strict=True)))

    def start(self) -> None:
        self._since = time.process_time()

    def stop(self) -> None:
        self.seconds += time.process_time() - self._since

    def look(self, step: int) -> float:
        """Measure the accuracy with the clock stopped; that of the last evaluation between two."""
        if step % self.every:
            return self.curve[-1]["accuracy"]
        accuracy = self.evaluate()
        spent = {"steps": step, "tokens": self.tokens, "flops": self.flops, "seconds": round(self.seconds, 2)}
        self.curve.append({**spent, "accuracy": accuracy})
        print(self.curve[-1], flush=True)
        return accuracy


class Looking(TrainerCallback):
    """Evaluates after each step, and ends a run that has reached the target."""

    def __init__(self, spent: Spent, target: float | None):
        self.spent, self.target = spent, target

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.spent.look(0)
        self.spent.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.spent.stop()
        accuracy = self.spent.look(state.global_step)
        control.should_training_stop |= self.target is not None and accuracy >= self.target
        self.spent.start()


def demo_run(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm until its accuracy is the target's, and return what it had spent by then."""
    teacher, curve = demo_teacher(options)
    if (arm, seed) != ("rewards", TEACHER_SEED):
        if arm == "fine-tuning":
            spent = fine_tune_demo(teacher, seed, options)
        else:
            given = {"teacher": str(teacher), **DEMO_ARMS[arm]} if DEMO_ARMS[arm] else {}
            _, spent = train_demo(given, seed, options.steps or 24, options, TARGET)
        curve = spent.curve
    return {"reached": reached(curve, TARGET), "curve": curve, "teacher_steps": options.teacher_steps}


def demo_teacher(options: argparse.Namespace) -> tuple[Path, list[dict[str, float]]]:
    """The folder of the demo's result, trained on the first call, and its curve."""
    folder: Path = options.folder / f"teacher-{options.teacher_steps}"
    if not (folder / "curve.json").is_file():
        trainer, spent = train_demo({}, TEACHER_SEED, options.teacher_steps, options, None)
        trainer.save_model(str(folder))
        (folder / "curve.json").write_text(json.dumps(spent.curve))
    return folder, json.loads((folder / "curve.json").read_text())


def train_demo(
    given: dict[str, Any], seed: int, steps: int, options: argparse.Namespace, target: float | None
) -> tuple[GRPOTrainer, Spent]:
    """Train with the demo's settings and those that are given, with rewards only where there is no teacher."""
    from covey.cli.demo import settings, sums
    from covey.rewards import numeric_match_reward

    rows, held_out = sums(0)  # all runs learn and are measured on the same sums
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = settings(Path(folder), seed, steps, record="off", disable_tqdm=True, use_cpu=True, bf16=False, **given)
        trainer = GRPOTrainer(
            model=model_path(None),
            reward_funcs=None if given else numeric_match_reward,
            args=args,
            train_dataset=rows,
        )
        spent = Spent(
            ModelSize.of(trainer.policy.config), evaluator(trainer.policy, held_out, options.samples), options.every
        )
        count_costs(trainer, spent, scorings=1 + (args.teacher_top_k > 0) if given else 0)
        trainer.add_callback(Looking(spent, target))
        trainer.train()
    return trainer, spent


def count_costs(trainer: Any, spent: Spent, scorings: int) -> None:
    """Count each rollout batch: sampled once, scored so often, and trained by three passes where there is a signal."""
    gather = trainer.gather_experience

    def gathering(rollouts: Any, mode: str, log: Any) -> Any:
        if mode == "train":
            groups: dict[int, tuple[int, list[int]]] = {}
            rewards: dict[int, set[float]] = {}
            totals = rollouts.rewards.sum(-1).tolist()
            for sample, rollout, total in zip(rollouts.samples, rollouts.rollouts, totals, strict=True):
                groups.setdefault(sample.prompt, (len(rollout.prompt_ids), []))[1].append(len(rollout.completion_ids))
                rewards.setdefault(sample.prompt, set()).add(total)
            signal = [scorings > 0 or len(rewards[prompt]) > 1 for prompt in groups]
            spent.add([*groups.values()], [1 + scorings + 3 * one for one in signal])
        return gather(rollouts, mode, log)

    trainer.gather_experience = gathering


def evaluator(model: Any, rows: list[dict[str, Any]], samples: int) -> Callable[[], float]:
    from transformers import AutoTokenizer

    from benchmarks.learn_worker import Evaluator

    evaluate = Evaluator(model, AutoTokenizer.from_pretrained(model_path(None), padding_side="left"), rows, samples)

    def measured() -> float:
        was_training = model.training
        model.eval()
        with torch.no_grad():
            share = evaluate()
        model.train(was_training)
        return share

    return measured


def fine_tune_demo(teacher: Path, seed: int, options: argparse.Namespace) -> Spent:
    """Minimise the mean negative log-prob of the tokens of answers that the teacher samples, new ones in each step.

    Prompts, answers a step, optimizer and learning rates are those of the other arms.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, get_constant_schedule_with_warmup

    from covey.cli.demo import sums
    from covey.core.batch import collate
    from covey.core.engine import SamplingParams
    from covey.engines.native.engine import NativeEngine
    from covey.policy.loading import end_token_ids
    from covey.policy.scoring import TokenScorer
    from covey.rollout.collector import Collector, PromptSample
    from covey.rollout.prompts import PromptCodec

    rows, held_out = sums(0)
    path = model_path(None)
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model, source = load(path, dtype=torch.float32), load(teacher, dtype=torch.float32).eval()
    text = AutoTokenizer.from_pretrained(path, padding_side="left")
    engine = NativeEngine(lambda: source, eos_token_ids=end_token_ids(source, text), pad_token_id=text.pad_token_id)
    collector = Collector(engine, PromptCodec(text, None, None), seed=seed)
    scorer = TokenScorer(lambda one: one, temperature=1.0, pad_token_id=text.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = get_constant_schedule_with_warmup(optimizer, WARMUP)
    order = shuffled_forever(rows, seed)
    spent = Spent(ModelSize.of(model.config), evaluator(model, held_out, options.samples), options.every)
    spent.look(0)
    for step in range(1, (options.steps or 24) + 1):
        spent.start()
        chosen = [next(order) for _ in range(GROUPS)]
        draws = [PromptSample(row, number, n) for number, row in enumerate(chosen) for n in range(GROUP)]
        with torch.no_grad(), engine.awake():
            rollouts = collector.collect(draws, SamplingParams(max_tokens=32), ("answers", str(step)))
        parts = [rollouts[first : first + 32] for first in range(0, len(rollouts), 32)]
        tokens = sum(len(one.completion_ids) for one in rollouts)
        for part in parts:
            (-scorer(model, collate(part)).logprobs.sum() / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        groups = [rollouts[first : first + GROUP] for first in range(0, len(rollouts), GROUP)]
        sizes = [(len(group[0].prompt_ids), [len(one.completion_ids) for one in group]) for group in groups]
        spent.add(sizes, [1 + 3] * len(groups))
        spent.stop()
        if spent.look(step) >= TARGET:
            break
    return spent


def shuffled_forever(rows: Sequence[Any], seed: int) -> Iterator[Any]:
    chance = random.Random(seed)
    while True:
        yield from chance.sample(rows, len(rows))


def reached(curve: Sequence[dict[str, float]], accuracy: float) -> dict[str, float] | None:
    """What had been spent when a curve, straight between its points, first has this accuracy; None where it never has.

    Example:
        >>> curve = [dict(steps=n, tokens=10 * n, flops=0, seconds=n, accuracy=n / 10) for n in (0, 5, 8)]
        >>> reached(curve, 0.65)
        {'steps': 6.5, 'tokens': 65.0, 'flops': 0.0, 'seconds': 6.5}
    """
    for before, after in itertools.pairwise(curve):
        if after["accuracy"] >= accuracy:
            share = max(0.0, (accuracy - before["accuracy"]) / (after["accuracy"] - before["accuracy"]))
            return {name: before[name] + share * (after[name] - before[name]) for name in QUANTITIES}
    return None


def demo_table(records: Sequence[dict[str, Any]]) -> str:
    """Costs of 60% by arm."""
    if not records:
        return ""
    units = {"steps": 1.0, "tokens": 1e3, "flops": 1e12, "seconds": 1.0}
    lines = [
        "| 60% by | runs | steps | sampled tokens (thousands) | operations (10¹²) | processor seconds |",
        "|---|---|---|---|---|---|",
    ]
    for arm in DEMO_ARMS:
        own = [one["reached"] for one in records if one["arm"] == arm]
        arrived = [one for one in own if one is not None]
        if own:
            cells = (interval([one[name] / unit for one in arrived], 1) for name, unit in units.items())
            lines.append(f"| {arm} | {len(arrived)} of {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: Sequence[float], digits: int = 0) -> str:
    """Mean and its 95% interval (Student's t).

    Example:
        >>> interval([1.0, 2.0, 3.0], 1)
        '2.0 (-0.5 to 4.5)'
    """
    if not values:
        return "-"
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    half = T_QUANTILES[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ({mean - half:.{digits}f} to {mean + half:.{digits}f})"


# ---- two tasks -------------------------------------------------------------------------------------------------------

LETTERS = "abcdefgh"
VOCABULARY = vocabulary_of([*LETTERS, "<", ">", ";", "="])
LENGTH, HELD_OUT, BATCH, EVERY = 3, 112, 64, 5
LEARNT = 0.9
BASE_STEPS, BASE_RATE = 400, 3e-3
TASK_ARMS = {
    "self-distillation": (True, False),
    "fine-tuning": (False, False),
    "self-distillation, with old rows": (True, True),
    "fine-tuning, with old rows": (False, True),
}
"""Arms: on the policy's own completions or not, with rows of the old task or without."""


def old_task(word: str) -> dict[str, str]:
    """Prompt, the prompt that the teacher reads, and answer.

    Example:
        >>> old_task("abh")
        {'prompt': '<abh=', 'shown': '<abh=', 'answer': 'hba'}
    """
    return {"prompt": f"<{word}=", "shown": f"<{word}=", "answer": word[::-1]}


def new_task(word: str) -> dict[str, str]:
    """The teacher reads the answer before the equals sign.

    Example:
        >>> new_task("abh")
        {'prompt': '>abh=', 'shown': '>abh;bca=', 'answer': 'bca'}
    """
    answer = "".join(LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in word)
    return {"prompt": f">{word}=", "shown": f">{word};{answer}=", "answer": answer}


def words(seed: int) -> tuple[list[str], list[str]]:
    """All words in an order by the seed: those to train on, and those held out."""
    every = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    random.Random(seed).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def base_model(seed: int, steps: int = BASE_STEPS) -> Any:
    """A model that reverses words after "<", and after ">" repeats the word, or what stands after a ";" in its place.

    What it is shown after a ";" are random words, so that it learns nothing of the new task.
    """
    torch.manual_seed(seed)
    model, chance = tiny_llama(VOCABULARY), random.Random(seed)
    known, _ = words(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        word, other = chance.choice, chance.choice
        texts = [(f"<{one}=", one[::-1]) for one in (word(known) for _ in range(BATCH))]
        texts += [(f">{one}=", one) for one in (word(known) for _ in range(BATCH // 2))]
        texts += [(f">{word(known)};{shown}=", shown) for shown in (other(known) for _ in range(BATCH))]
        loss_on(model, texts).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def loss_on(model: Any, texts: Sequence[tuple[str, str]]) -> Tensor:
    """Mean negative log-prob of the tokens of answers, each with the end, after their prompts."""
    rows = [[VOCABULARY[letter] for letter in prompt + answer] + [VOCABULARY["<eos>"]] for prompt, answer in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    places = torch.arange(width)[None]
    first = torch.tensor([len(prompt) for prompt, _ in texts])[:, None]
    last = torch.tensor([len(row) for row in rows])[:, None]
    labels = torch.where((places >= first) & (places < last), ids, -100)
    mask = (places < last).long()
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


@torch.no_grad()
def answers(model: Any, prompts: Sequence[str], greedy: bool) -> list[str]:
    """What the model writes after prompts of one length."""
    ids = torch.tensor([[VOCABULARY[letter] for letter in prompt] for prompt in prompts])
    width = ids.shape[1]
    names = {number: token for token, number in VOCABULARY.items()}
    for _ in range(LENGTH + 1):
        logits = model(input_ids=ids).logits[:, -1]
        logits[:, VOCABULARY["<pad>"]] = -torch.inf
        chosen = logits.argmax(-1, keepdim=True) if greedy else logits.softmax(-1).multinomial(1)
        ids = torch.cat([ids, chosen], 1)
    texts = ["".join(names[number] for number in row) for row in ids[:, width:].tolist()]
    return [text.partition("<eos>")[0] for text in texts]


def accuracy(model: Any, task: Callable[[str], dict[str, str]], held_out: Sequence[str], column: str) -> float:
    rows = [task(word) for word in held_out]
    was_training = model.training
    model.eval()
    found = answers(model, [row[column] for row in rows], greedy=True)
    model.train(was_training)
    return statistics.fmean(text == row["answer"] for text, row in zip(found, rows, strict=True))


def both_tasks(model: Any, held_out: Sequence[str]) -> dict[str, float]:
    return {"old": accuracy(model, old_task, held_out, "prompt"), "new": accuracy(model, new_task, held_out, "prompt")}


def task_run(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm; accuracies on both tasks over its steps."""
    on_policy, with_old = TASK_ARMS[arm]
    folder = options.folder / f"base-{seed}"
    if not (folder / "config.json").is_file():
        base_model(seed).save_pretrained(folder)
    load = type(tiny_llama(VOCABULARY)).from_pretrained
    model, (known, held_out) = load(folder), words(seed)
    with torch.no_grad():
        shown = accuracy(model.eval(), new_task, held_out, "shown")
    tasks = [new_task, old_task if with_old else new_task]
    rows = [tasks[number % 2](word) for number, word in enumerate(known)]
    curve: list[dict[str, float]] = []
    seconds = -time.process_time()

    def look(step: int) -> None:
        if step % EVERY == 0:
            nonlocal seconds
            seconds += time.process_time()
            curve.append({"steps": step, "seconds": round(seconds, 2), **both_tasks(model, held_out)})
            seconds -= time.process_time()

    learn = distil_itself if on_policy else fine_tune
    learn(model, load(folder).eval(), rows, seed, options.steps or 80, options.learning_rate, look)
    return {"learning_rate": options.learning_rate, "shown": shown, "curve": curve}


def distil_itself(
    model: Any,
    teacher: Any,
    rows: list[dict[str, str]],
    seed: int,
    steps: int,
    rate: float,
    look: Callable[[int], None],
) -> None:
    """The model as it was at the start reads the shown prompts, and scores the completions of the policy."""

    class LookingOn(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            look(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            look(state.global_step)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        GRPOTrainer(
            model=model,
            args=GRPOConfig(
                output_dir=folder,
                seed=seed,
                teacher="start",
                teacher_prompt="shown",
                teacher_loss="divergence",
                teacher_top_k=-1,
                teacher_beta=0.5,
                num_generations=1,
                per_device_train_batch_size=BATCH,
                max_completion_length=LENGTH + 1,
                max_steps=steps,
                learning_rate=rate,
                lr_scheduler_type="constant",
                save_strategy="no",
                report_to="none",
                record="off",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
            ),
            train_dataset=rows,
            processing_class=tokenizer(VOCABULARY),
            callbacks=[LookingOn()],
        ).train()


def fine_tune(
    model: Any,
    teacher: Any,
    rows: list[dict[str, str]],
    seed: int,
    steps: int,
    rate: float,
    look: Callable[[int], None],
) -> None:
    """Cross-entropy on answers that the model as it was at the start samples after the shown prompts."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    order = shuffled_forever(rows, seed)
    look(0)
    model.train()
    for step in range(1, steps + 1):
        chosen = [next(order) for _ in range(BATCH)]
        texts = []
        for width in {len(row["shown"]) for row in chosen}:
            own = [row for row in chosen if len(row["shown"]) == width]
            found = answers(teacher, [row["shown"] for row in own], greedy=False)
            texts += [(row["prompt"], text) for row, text in zip(own, found, strict=True)]
        loss_on(model, texts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        look(step)


def task_table(records: Sequence[dict[str, Any]]) -> str:
    """Accuracies on both tasks by arm, in percent."""
    if not records:
        return ""
    lines = [
        f"| arm | runs | old / new before | steps to {LEARNT:.0%} of the new | old then | old at its lowest"
        " | old / new at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, rate in sorted(
        {(one["arm"], one["learning_rate"]) for one in records}, key=lambda it: [*TASK_ARMS].index(it[0])
    ):
        curves = [one["curve"] for one in records if (one["arm"], one["learning_rate"]) == (arm, rate)]
        learnt = [next((point for point in curve if point["new"] >= LEARNT), None) for curve in curves]
        arrived = [point for point in learnt if point is not None]
        before, end = ([curve[place] for curve in curves] for place in (0, -1))
        cells = [
            f"{arm}, {rate:g}",
            f"{len(arrived)} of {len(curves)}",
            both(before),
            interval([point["steps"] for point in arrived]),
            interval([100 * point["old"] for point in arrived]),
            interval([100 * min(point["old"] for point in curve) for curve in curves]),
            both(end),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def both(points: Sequence[dict[str, float]]) -> str:
    return " / ".join(interval([100 * point[task] for point in points]) for task in ("old", "new"))


if __name__ == "__main__":
    main()
