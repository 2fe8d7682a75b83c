"""Programs of the `tinker` client: does a recipe learn as `GRPOTrainer` does, and what does the wire cost?

    python -m benchmarks.tinker --part recipe --seeds 1 2 3      # the cookbook's arithmetic recipe, unmodified
    python -m benchmarks.tinker --part grpo --seeds 1 2 3        # the same task and settings with GRPOTrainer
    python -m benchmarks.tinker --part grpo --steps 6            # the first steps, of which each is compared
    python -m benchmarks.tinker --part replay --seeds 3          # GRPOTrainer with the random numbers of the recipe
    python -m benchmarks.tinker --part clients                   # tokens per second of 1, 2, 4 and 8 clients at once
    python -m benchmarks.tinker --part wire                      # a datum and a sample, through the client and not
    python -m benchmarks.tinker --part datums                    # forward_backward against Covey's own micro-batches

The recipe asks for sums of two numbers from 0 to 100, with an example before them, in at most 5 tokens. Its prompts
depend on the number of the step alone, so that all runs of both ways get the same 24 times 8 sums, which do not repeat;
seeds are those of the adapters and samples. *Before* are the samples of the first six steps and *after* those of the
last six, 48 sums with `--group-size` samples each, with 95% intervals over sums. Few of the first samples are right,
but a part of the reward is paid for ending in time, which all seeds learn in the first steps: `first_steps` compares
the two ways by it and by the tokens of a sample. A replay takes chance out: `GRPOTrainer` starts with the adapter that
the server gives the recipe and draws with the same random numbers, so that both have the same curve, but for rounding.
`make test-tinker` makes the environment of the client. Results are appended to `benchmarks/tinker.jsonl`; what is there
is not measured again.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.claims.statistic import crossed
from benchmarks.machine import describe, model_path
from benchmarks.records import Records
from covey.core.estimates import interval_of_mean, interval_of_share

ROOT = Path(__file__).resolve().parents[1]
STEPS, PROMPTS, MAX_TOKENS, RANK, RATE = 24, 8, 5, 16, 3e-4
"""Of the arithmetic runs."""
WINDOW = 6  # steps whose samples are counted together
WAYS = {"recipe": "the recipe", "grpo": "`GRPOTrainer`"}
ALPHA = 32  # scale of an adapter times its rank, as the server has it


# ---- learning --------------------------------------------------------------------------------------------------------


def recipe(model: str, python: str, seed: int, group: int, steps: int, folder: Path) -> dict[str, Any]:
    """Run the cookbook's recipe with a server of its own.

    Returns the share of right samples for each sum of each step, and for each step the share of samples that end in
    time and their mean number of tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = {
        "env": "arithmetic",
        "model_name": model,
        "renderer_name": "qwen3_instruct",
        "loss_fn": "importance_sampling",
        "groups_per_batch": PROMPTS,
        "group_size": group,
        "learning_rate": RATE,
        "lora_rank": RANK,
        "max_steps": steps,
        "seed": seed,
        "log_path": folder.resolve() / "log",
        "behavior_if_log_dir_exists": "delete",
    }
    program = [python, "-m", "tinker_cookbook.recipes.math_rl.train", *(f"{name}={one}" for name, one in flags.items())]
    served = ["--model", model, "--seed", str(seed), "--checkpoints", str(folder / "states")]
    server = [sys.executable, "-m", "covey.cli.main", "tinker-serve", *served, "--log", str(folder / "operations")]
    without = ["env", "-u", "PYTHONPATH"]  # Covey is not where the recipe runs
    used, began = _processor_seconds(), time.perf_counter()
    with (folder / "output").open("w") as output:
        subprocess.run([*server, "--", *without, *program], check=True, stdout=output, stderr=subprocess.STDOUT)
    seconds = time.perf_counter() - began
    samples = [_samples_of(folder / "log", step) for step in range(steps)]
    metrics = [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]
    differences = [one["optim/kl_sample_train_v1"] for one in metrics if "optim/kl_sample_train_v1" in one]
    return {
        **_by_step(samples, group),
        "seconds": round(seconds, 1),
        "processor_seconds": round(_processor_seconds() - used, 1),
        "kl_sample_train": max(map(abs, differences)),
    }


Sample = tuple[float, float, int]
"""Whether it is right, whether it ends in time, and its number of tokens."""


def _samples_of(log: Path, step: int) -> list[Sample]:
    """Samples of a step, sum by sum, from the summaries that the recipe writes."""
    (file,) = log.glob(f"**/iteration_{step:06d}/train_rollout_summaries.jsonl")
    rollouts = sorted(map(json.loads, file.read_text().splitlines()), key=lambda rollout: rollout["group_idx"])
    last = [rollout["steps"][-1] for rollout in rollouts]
    return [(one["metrics"]["correct"], one["metrics"]["format"], one["ac_len"]) for one in last]


def _by_step(steps: Sequence[Sequence[Sample]], group: int) -> dict[str, Any]:
    """Right samples for each sum of each step; samples that end, and tokens, for each step."""
    right = [[one[0] for one in samples] for samples in steps]
    return {
        "shares": [[statistics.fmean(one[at : at + group]) for at in range(0, len(one), group)] for one in right],
        "ended": [round(statistics.fmean(one[1] for one in samples), 4) for samples in steps],
        "tokens": [round(statistics.fmean(one[2] for one in samples), 4) for samples in steps],
    }


def _processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in uses)


def sums_of(step: int) -> list[tuple[int, int]]:
    """The sums that the recipe asks for in a step."""
    chance = np.random.RandomState(step)
    return [(int(chance.randint(0, 101)), int(chance.randint(0, 101))) for _ in range(PROMPTS)]


def prompt_of(terms: tuple[int, int]) -> str:
    """The recipe's prompt, as its renderer for ChatML writes it."""
    turns = [("user", "What is 4 + 5?"), ("assistant", "9"), ("user", f"What is {terms[0]} + {terms[1]}?")]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def grpo(model: str, seed: int, group: int, steps: int, folder: Path, replays: bool = False) -> dict[str, Any]:
    """The same task with GRPOTrainer: the same prompts in the same order, rewards, adapter, loss and optimizer.

    With `replays` also the same start and the same random numbers as the recipe with a server of this seed.
    """
    import re

    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    from covey import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    samples: list[list[Sample]] = []

    def reward(completion_ids: list[list[int]], answer: list[int], **_: Any) -> list[float]:
        samples.append([])
        for ids, wanted in zip(completion_ids, answer, strict=True):
            ended = ids[-1] == tokenizer.eos_token_id
            numbers = re.findall(r"-?\d+", tokenizer.decode(ids[:-1] if ended else ids).replace(",", ""))
            samples[-1].append((float(bool(numbers) and int(numbers[-1]) == wanted), float(ended), len(ids)))
        return [0.1 * (ended - 1) + right for right, ended, _ in samples[-1]]

    rows = [{"prompt": prompt_of(one), "answer": sum(one)} for step in range(steps) for one in sums_of(step)]
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    args = GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * group,
        num_generations=group,
        max_completion_length=MAX_TOKENS,
        shuffle_dataset=False,
        # a sum of token losses without a scale of the advantages, and AdamW, whose epsilon has the gradient's scale
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        adam_beta2=0.95,
        adam_epsilon=1e-8 / (PROMPTS * group * MAX_TOKENS),
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    used, began = _processor_seconds(), time.perf_counter()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers),
    )
    if replays:
        _start_as_the_recipe(trainer, model, seed)
        _draw_as_the_recipe(trainer, seed, group, [tokenizer(row["prompt"])["input_ids"] for row in rows])
    trainer.train()
    return {
        **_by_step(samples, group),
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(_processor_seconds() - used, 1),
    }


def _start_as_the_recipe(trainer: Any, model: str, seed: int) -> None:
    """Set the adapter to the one that a server of this seed makes for its first training client."""
    from transformers import AutoModelForCausalLM

    from covey.tinker.adapter import Adapter, AdapterSpec
    from covey.tinker.sampling import seed_of

    base = AutoModelForCausalLM.from_pretrained(model)
    start = Adapter.new(base, AdapterSpec(RANK, seed_of(seed, "adapter", 0))).saved()
    trained = {name.replace(".default", ""): one for name, one in trainer.model.named_parameters() if one.requires_grad}
    assert trained.keys() == start.keys(), "the same layers are trained"
    with torch.no_grad():
        for name, matrix in start.items():
            trained[name].copy_(matrix)


def _draw_as_the_recipe(trainer: Any, seed: int, group: int, prompts: Sequence[list[int]]) -> None:
    """Draw with the seeds of a server for the recipe, which asks for one sample at a time, in the order of its sums.

    Each of its steps has a sampler of its own, and each request a number; both begin with 0.
    """
    from covey.tinker.sampling import seed_of

    engine, asked = trainer.collector.engine, 0
    generate = engine.generate

    async def with_seeds(request: Any) -> Any:
        nonlocal asked
        assert request.n == group and list(request.prompt_ids) == prompts[asked], "sums come in order"
        step, number = divmod(asked, PROMPTS)
        asked += 1
        seeds = [seed_of(seed, step, number * group + one, 0) for one in range(group)]
        return await generate(dataclasses.replace(request, seeds=seeds))

    engine.generate = with_seeds


def before_and_after(records: Records, group: int) -> str:
    """Markdown: shares of right samples in the first and the last steps, of each seed and way."""
    lines = ["| | seed | before | after | minutes | processor minutes |", "|---|---|---|---|---|---|"]
    for part, name in WAYS.items():
        for run in sorted(records.find(part=part, group=group, steps=STEPS), key=lambda run: run["seed"]):
            cells = [
                name,
                str(run["seed"]),
                *(_share(run["shares"][at], group) for at in (slice(WINDOW), slice(-WINDOW, None))),
            ]
            cells += [f"{run[key] / 60:.1f}" for key in ("seconds", "processor_seconds")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(records: Records, group: int) -> str:
    """Markdown: the same by six steps over all seeds, and the difference of the two ways, which get the same sums."""
    lines = ["| steps | " + " | ".join(WAYS.values()) + " | difference |", "|---|---|---|---|"]
    runs = {part: [run["shares"] for run in records.find(part=part, group=group, steps=STEPS)] for part in WAYS}
    if not all(runs.values()):
        return ""
    for first in range(0, STEPS, WINDOW):
        by_sum = {
            part: [
                statistics.fmean(one)
                for step in range(first, first + WINDOW)
                for one in zip(*(run[step] for run in found), strict=True)
            ]
            for part, found in runs.items()
        }
        differences = [served - own for served, own in zip(*by_sum.values(), strict=True)]
        low, high = interval_of_mean(differences)
        cells = [f"{first + 1} to {first + WINDOW}"]
        cells += [_share([values], group * len(runs[part])) for part, values in by_sum.items()]
        cells.append(f"{100 * statistics.fmean(differences):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def first_steps(records: Records, group: int) -> str:
    """Markdown: samples that end in time, and tokens of a sample, in each step that all runs have: means over seeds.

    Intervals of the differences are Student's t over seeds.
    """
    lines = ["| step | | " + " | ".join(WAYS.values()) + " | difference |", "|---|---|---|---|---|"]
    runs = {part: {run["seed"]: run for run in records.find(part=part, group=group) if "ended" in run} for part in WAYS}
    seeds = sorted(set.intersection(*map(set, runs.values())))
    if len(seeds) < 2:
        return ""
    for step in range(min(len(found[seed]["ended"]) for found in runs.values() for seed in seeds)):
        for name, unit in (("ended", "ends in time"), ("tokens", "tokens")):
            served, own = (np.array([found[seed][name][step] for seed in seeds]) for found in runs.values())
            gap = crossed((served - own)[:, None])
            cells = [str(step + 1), unit, f"{served.mean():.2f}", f"{own.mean():.2f}"]
            lines.append(f"| {' | '.join([*cells, f'{gap.mean:+.2f} ({gap.low:+.2f} to {gap.high:+.2f})'])} |")
    return "\n".join(lines)


def same_random_numbers(records: Records, group: int) -> str:
    """Markdown: the recipe and its replays; steps and sums that have the same number of right samples in both."""
    lines = ["| seed | steps alike | sums alike | recipe, after | replay, after |", "|---|---|---|---|---|"]
    for run in sorted(records.find(part="replay", group=group), key=lambda run: run["seed"]):
        for served in records.find(part="recipe", group=group, seed=run["seed"], steps=run["steps"]):
            steps = [
                [math.isclose(own, other) for own, other in zip(*both, strict=True)]
                for both in zip(run["shares"], served["shares"], strict=True)
            ]
            alike, sums = sum(map(all, steps)), [one for step in steps for one in step]
            after = [_share(one["shares"][-WINDOW:], group) for one in (served, run)]
            cells = [str(run["seed"]), f"{alike} of {len(steps)}", f"{sum(sums)} of {len(sums)}", *after]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _share(steps: Sequence[Sequence[float]], draws: int) -> str:
    """The mean over sums, in percent, with its interval."""
    values = [value for step in steps for value in step]
    low, high = interval_of_share(values, draws)
    return f"{100 * statistics.fmean(values):.1f}% ({100 * low:.1f} to {100 * high:.1f})"


# ---- what a program costs --------------------------------------------------------------------------------------------


class Program:
    """`tinker_program.py` in the client's environment, connected to a server; a context in which it runs."""

    def __init__(self, python: str, url: str):
        self._command = [python, "-P", "-W", "ignore", str(ROOT / "benchmarks/tinker_program.py")]
        added = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | added

    def __enter__(self) -> "Program":
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, env=self._environment, stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, do: str, **settings: Any) -> dict[str, Any]:
        """Let the program do something; its finding, its seconds, and the processor's in both processes."""
        used = time.process_time()
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._process.stdin.write(json.dumps({"do": do, **settings}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the program ended"
        found: dict[str, Any] = json.loads(answer)
        return found | {"server_processor_seconds": time.process_time() - used}


def tokens_of(count: int, seed: int, vocabulary: int = 200) -> list[int]:
    return torch.randint(10, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequences_of(groups: int, group: int, prompt: int, completion: int) -> list[list[int]]:
    """Sequences of groups that have a prompt in common."""
    return [
        tokens_of(prompt, number) + tokens_of(completion, 1000 + group * number + member)
        for number in range(groups)
        for member in range(group)
    ]


def clients(model: str, python: str, folder: Path, counts: Sequence[int] = (1, 2, 4, 8)) -> dict[str, Any]:
    """Tokens per second of several clients at once: 8 samples of 32 tokens, then a step on 4 datums of 100, of each."""
    from covey.tinker.build import serve

    found: dict[str, Any] = {}
    prompts, sequences = [tokens_of(32, 1), tokens_of(32, 2)], sequences_of(1, 4, 36, 64)
    with serve(model, checkpoints=folder / "states") as url, Program(python, url) as program:
        program.ask("open", model=model, clients=max(counts), rank=RANK, tokens=tokens_of(8, 3))
        program.ask("sample", clients=1, prompts=prompts, n=1, tokens=2)
        for count in counts:
            for name, asked in {
                "sample": {"prompts": prompts, "n": 4, "tokens": 32},
                "train": {"sequences": sequences, "head": 35, "steps": True},
            }.items():
                one = program.ask(name, clients=count, **asked)
                print(name, count, one, flush=True)
                by = {key: round(one["found"] / one[key], 1) for key in ("seconds", "server_processor_seconds")}
                found[f"{name}-{count}"] = {"tokens": one["found"], **{f"tokens_per_{key}": by[key] for key in by}}
    return found


def wire(python: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of a datum of 200 tokens and of a sample of 16, through the client and in process.

    The model is so small that the difference is that of the wire: 64 datums in one request, 64 requests for one sample.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from covey.engines.native.adapter_engine import AdapterEngine
    from covey.tinker.build import opened
    from covey.tinker.server import served
    from covey.tinker.service import Settings

    words = Tokenizer(WordLevel({str(number): number for number in range(256)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=1, tie_word_embeddings=True, **sizes))
    sequences, prompts = sequences_of(8, 8, 100, 100), [tokens_of(32, number) for number in range(64)]
    times: dict[str, list[dict[str, float]]] = {}
    with opened(tiny, Settings(("tiny",)), folder / "tiny", tokenizer=tokenizer) as service:
        learner = _learner(service)
        engine = AdapterEngine(lambda: tiny, pad_token_id=0, eos_token_ids=set(), adapters=dict)
        with served(service) as url, Program(python, url) as program:
            program.ask("open", model="tiny", clients=1, rank=RANK, tokens=tokens_of(8, 3))
            for _ in range(rounds + 1):
                ways = {
                    "datum": lambda: program.ask("train", clients=1, sequences=sequences, head=99, steps=False),
                    "datum in process": lambda: _trained(learner, sequences, 99),
                    "sample": lambda: program.ask("sample", clients=1, prompts=prompts, n=1, tokens=16),
                    "sample in process": lambda: _sampled(engine, prompts, 16),
                    "sample alone": lambda: program.ask("sample", clients=1, prompts=prompts[:1], n=1, tokens=16),
                    "sample alone in process": lambda: _sampled(engine, prompts[:1], 16),
                }
                for name, way in ways.items():
                    times.setdefault(name, []).append(_timed(way))
    found: dict[str, Any] = {}
    for name, taken in times.items():
        count = 1 if "alone" in name else 64
        for key in ("seconds", "processor_seconds"):
            median = statistics.median(one[key] for one in taken[1:])  # the first warms up
            found.setdefault(name, {})[f"milli{key}"] = round(1000 * median / count, 3)
    return found


def _timed(way: Callable[[], Any]) -> dict[str, float]:
    """Seconds, and the processor's in this process and in the client's."""
    began, used = time.perf_counter(), time.process_time()
    answer = way()
    seconds, used = time.perf_counter() - began, time.process_time() - used
    if isinstance(answer, dict):
        seconds, used = answer["seconds"], used + answer["processor_seconds"]
    return {"seconds": seconds, "processor_seconds": used}


def _learner(service: Any) -> Any:
    """An adapter over a service's model, without its wire."""
    from covey.tinker.adapter import Adapter, AdapterSpec
    from covey.tinker.learner import Learner

    return Learner(service.base, Adapter.new(service.base.model, AdapterSpec(RANK)))


def _trained(learner: Any, sequences: Sequence[list[int]], head: int) -> None:
    """forward_backward in process, on what `tinker_program.py` sends."""
    import numpy as np

    from covey.tinker.losses import LOSSES
    from covey.tinker.wire import Datum, WireTensor

    data = []
    for number, tokens in enumerate(sequences):
        length = len(tokens) - 1
        given = {
            "target_tokens": np.array(tokens[1:], np.int64),
            "logprobs": np.array([0.0] * head + [-1.0] * (length - head), np.float32),
            "advantages": np.array([0.0] * head + [1.0 if number % 2 else -1.0] * (length - head), np.float32),
        }
        data.append(Datum(tokens[:-1], {name: WireTensor(values, (length,)) for name, values in given.items()}))
    learner.forward_backward(data, LOSSES["importance_sampling"], {})


def _sampled(engine: Any, prompts: Sequence[list[int]], tokens: int) -> None:
    from covey.core.engine import SampleRequest, SamplingParams

    async def main() -> None:
        params = SamplingParams(max_tokens=tokens)
        with engine.awake():
            await asyncio.gather(*(engine.generate(SampleRequest([*one, 3], 1, params, [0])) for one in prompts))

    asyncio.run(main())


def datums(model: str, folder: Path, rounds: int, groups: int) -> dict[str, Any]:
    """Processor seconds of forward_backward of groups of 8 datums of 200 tokens, and of GRPOTrainer on the same tokens.

    In pairs, each with micro-batches of its own size; half of the tokens are the group's prompt.
    """
    from peft import LoraConfig
    from transformers import AutoTokenizer

    from covey import GRPOConfig, GRPOTrainer
    from covey.engines.scripted import ScriptedEngine
    from covey.tinker.build import opened
    from covey.tinker.service import Settings

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [
        {"prompt": tokenizer.decode([*tokens_of(48, number, 40000)] * 2)} for number in range(groups * (rounds + 1))
    ]
    args = GRPOConfig(
        output_dir=str(folder / "datums"),
        max_steps=rounds + 1,
        per_device_train_batch_size=8 * groups,
        num_generations=8,
        max_completion_length=100,
        loss_type="dr_grpo",
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        record="off",
        engine_parity="off",
    )
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(number % 8) for number in range(len(completions))],
        args=args,
        train_dataset=rows,
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers),
    )
    scripted = ScriptedEngine(lambda prompt, seed: tokens_of(100, seed % 1000003, 40000))

    async def generate(request: Any) -> Any:
        scripted.version = trainer.state.global_step  # that of the policy
        return await scripted.generate(request)

    trainer.collector.engine.generate = generate
    pairs: list[tuple[float, float]] = []
    with opened(model, Settings(("model",)), folder / "datums-states") as service:
        learner, gradients = _learner(service), trainer.updates.gradients

        def both(model: Any, micro_step: Any) -> Any:
            began = time.process_time()
            result = gradients(model, micro_step)
            own = time.process_time() - began
            sequences, head = [], 0
            for batch in micro_step.micro_batches:
                prompts = [one.tolist() for one in batch.prompts()]
                for group, one in zip(batch.groups.tolist(), batch.completions(), strict=True):
                    sequences.append([*prompts[group], *one.tolist()])
                    head = len(prompts[group]) - 1
            began = time.process_time()
            _trained(learner, sequences, head)
            pairs.append((own, time.process_time() - began))
            print(len(sequences), len(sequences[0]), len(micro_step.micro_batches), pairs[-1], flush=True)
            return result

        trainer.updates.gradients = both
        trainer.train()
    ratios = [served / own for own, served in pairs[1:]]  # the first allocates
    return {
        "datums": 8 * groups,
        "pairs": len(ratios),
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
        "trainer_processor_seconds": round(statistics.median(own for own, _ in pairs[1:]), 2),
        "server_processor_seconds": round(statistics.median(served for _, served in pairs[1:]), 2),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("recipe", "grpo", "replay", "clients", "wire", "datums"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS, help="of recipe, grpo and replay")
    parser.add_argument("--group-size", type=int, default=16, help="samples of a sum, in these")
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct unless given")
    parser.add_argument("--python", default=str(ROOT / ".venv-tinker-newest/bin/python"), help="has the client")
    parser.add_argument("--rounds", type=int, default=5, help="of wire and datums")
    parser.add_argument("--groups", type=int, default=8, help="of 8 datums, in datums")
    parser.add_argument("--output", type=Path, default=Path("runs/tinker"), help="for logs and saved states")
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks/tinker.jsonl")
    given = parser.parse_args()
    model, records, group = model_path(given.model), Records(given.records), given.group_size
    if given.part in ("recipe", "grpo", "replay"):
        for seed in given.seeds:
            key = {"part": given.part, "group": group, "steps": given.steps, "seed": seed}
            if records.find(**key):
                continue
            folder = given.output / f"{given.part}-{group}-{seed}"
            if given.part == "recipe":
                found = recipe(model, given.python, seed, group, given.steps, folder)
            else:
                found = grpo(model, seed, group, given.steps, folder, replays=given.part == "replay")
            records.add(**key, **found, machine=describe(torch.get_num_threads()))
        print(
            *(table(records, group) for table in (before_and_after, curves, first_steps, same_random_numbers)),
            sep="\n\n",
        )
    elif given.part is not None:
        if given.part == "clients":
            found = clients(model, given.python, given.output)
        elif given.part == "wire":
            found = wire(given.python, given.output, given.rounds)
        else:
            found = datums(model, given.output, given.rounds, given.groups)
        print(json.dumps(records.add(part=given.part, **found, machine=describe(torch.get_num_threads()))))


if __name__ == "__main__":
    main()
