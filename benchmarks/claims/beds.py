"""Beds: tasks on which the arms of claims are trained or measured, with all that is fixed between them.

Each is a dataclass whose fields are part of a claim's digest. `run` gets arms, as settings that differ, and pairs of
an arm and a seed, and returns what each run has found, as JSON.
"""

import math
import random
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.claims.claim import Result, Runs
from benchmarks.claims.rewards import REWARDS
from benchmarks.halving import SETTINGS, TASKS, right_number
from benchmarks.machine import model_path

Arms = Mapping[str, Mapping[str, Any]]
LOGS = (
    "reward", "entropy", "kl", "reverse_kl", "num_tokens", "frac_reward_zero_std", "kept_token_fraction",
    "chosen_token_fraction", "clip_ratio/high_mean", "clip_ratio/low_mean", "completions/mean_length",
    "completions/clipped_ratio", "rewards/all_or_nothing/mean",
)  # fmt: skip
"""Metrics of a run that are written down, where it logs them."""


def quiet(**settings: Any) -> dict[str, Any]:
    """Settings of a training run on a CPU that writes nothing but what is read here."""
    common = {"logging_steps": 1, "report_to": "none", "record": "off", "use_cpu": True, "bf16": False}
    return {
        **common,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        **settings,
    }


@dataclass(frozen=True)
class StudyBed:
    """Adapters of SmolLM2-135M-Instruct on tasks of reasoning-gym, up to eight in one study (docs/studies.md)."""

    name: ClassVar[str] = "SmolLM2-135M, LoRA"
    at_once: ClassVar[int] = 8
    tasks: tuple[tuple[str, int], ...] = (("sum", 0),)  # of `TASKS` or `MORE_TASKS`, with a number of rows (0: all)
    held_out: int = 32  # prompts of evaluations, an equal share of each task
    evaluations: tuple[int, ...] = (2, 4, 8)  # steps, and the last one
    rewards: str = "graded"  # a name of `REWARDS`
    settings: Mapping[str, Any] = field(default_factory=dict)  # fixed for all arms; over `halving.SETTINGS`

    def rows(self) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """Prompts to train on and held-out ones, the tasks mixed."""
        train: list[dict[str, str]] = []
        held: list[dict[str, str]] = []
        for task, count in self.tasks:
            own = task_rows(task)
            share = self.held_out // len(self.tasks)
            if len(own) < 2 * share:
                raise ValueError(f"{task} has only {len(own)} different questions, and {share} are held out")
            held += own[:share]
            train += own[share : share + count] if count else own[share:]
        random.Random(0).shuffle(train)
        return train, held

    def config(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {**SETTINGS, "max_steps": 16, "learning_rate": 5e-4, **self.settings, **changes}

    def run(self, arms: Arms, runs: Sequence[tuple[str, int]], folder: str) -> Runs:
        """Train the runs in one study; an interrupted one continues from its last checkpoint in `folder`."""
        from benchmarks.claims import losses
        from covey_tools.study.study import Study

        losses.register()
        train, held_out = self.rows()
        places = {arm: place for place, arm in enumerate(arms)}
        names = {f"arm{places[arm]}seed{seed}": (arm, seed) for arm, seed in runs}  # names of folders
        variants = {name: {**arms[arm], "seed": seed} for name, (arm, seed) in names.items()}
        study = Study(
            model_path(None),
            variants,
            {**self.config({}), "output_dir": folder},
            reward_funcs=REWARDS[self.rewards],
            train_dataset=train,
            eval_dataset=held_out,
            eval_steps=list(self.evaluations),
            save_rounds=4,
        )
        found = {}
        for name, variant in study.train().items():
            if variant.status != "finished":
                raise RuntimeError(f"{name} {variant.status}: {variant.reason}")
            found[names[name]] = {
                "evaluations": [[step, _rounded(rewards)] for step, rewards in sorted(variant.evaluations.items())],
                "logs": logs_of(Path(folder) / str(variant.checkpoint) / "trainer_state.json"),
                "learning_rate": self.config(variants[name])["learning_rate"],
            }
        return found


MORE_TASKS: dict[str, tuple[str, dict[str, int]]] = {
    "sums of 1 to 3 digits": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 3}),
    "sums of 2 digits": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
}


def task_rows(task: str) -> list[dict[str, str]]:
    """Different questions of a task in a fixed random order, as prompt and answer."""
    import reasoning_gym

    name, settings = {**TASKS, **MORE_TASKS}[task]
    entries = reasoning_gym.create_dataset(name, size=400, seed=1, **settings)
    answers = {entry["question"].strip(): str(entry["answer"]) for entry in entries}
    questions = sorted(answers)
    random.Random(0).shuffle(questions)
    return [{"prompt": f"{question}\nAnswer:", "answer": answers[question]} for question in questions]


def logs_of(state: Path) -> dict[str, list[list[float]]]:
    """Metrics of `LOGS` by step from a checkpoint's `trainer_state.json`."""
    import json

    history = json.loads(state.read_text())["log_history"]
    return history_logs(history)


def history_logs(history: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for entry in history:
        for name in LOGS:
            if name in entry and math.isfinite(float(entry[name])):
                found.setdefault(name, []).append([entry["step"], float(f"{float(entry[name]):.6g}")])
    return found


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


@dataclass(frozen=True)
class TinyBed:
    """A random Llama of two layers on the alphabet (`benchmarks.process_supervision`), whole, 128 completions a step.

    `reward` is "first" (the first letter is right; the length is free, as completions end with a token) or "share" (of
    right letters, of a fixed number). The engine is the policy itself, with `copies` a copy of its weights, with
    `bits` a copy whose matrices are rounded to so many bits.
    """

    name: ClassVar[str] = "tiny Llama"
    at_once: ClassVar[int] = 1
    reward: str = "first"
    tokens: int = 32
    steps: int = 60
    learning_rate: float = 1e-3
    copies: bool = False
    bits: float | None = None
    mixture: bool = False  # eight experts, of which two are used
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of GRPO for an arm."""
        changes = {name: value for name, value in changes.items() if name != "bits"}
        common = quiet(
            per_device_train_batch_size=128,
            num_generations=16,
            max_completion_length=self.tokens,
            max_steps=self.steps,
            learning_rate=self.learning_rate,
            save_strategy="no",
        )
        return {**common, **self.settings, **changes}

    def run(self, arms: Arms, runs: Sequence[tuple[str, int]], folder: str) -> Runs:
        return {(arm, seed): self.train(arms[arm], seed) for arm, seed in runs}

    def train(self, changes: Mapping[str, Any], seed: int, save: Path | None = None) -> Result:
        """Train a model from random weights of this seed, and write it to a folder `save`."""
        from benchmarks.claims import losses
        from benchmarks.claims.engines import RoundedEngine
        from benchmarks.letters import tiny_llama, tokenizer
        from benchmarks.process_supervision import LETTERS, VOCABULARY, answer, rights
        from covey import GRPOConfig, GRPOTrainer

        losses.register()
        curves: dict[str, list[float | None]] = {"accuracy": [], "wrong length": [], "right length": []}

        def reward(completion_ids: list[list[int]], answer: list[str], **columns: Any) -> list[float]:
            right = [rights(ids, wanted) for ids, wanted in zip(completion_ids, answer, strict=True)]
            if self.reward == "share":
                rewards = [sum(one) / self.tokens for one in right]
                curves["accuracy"].append(round(sum(rewards) / len(rewards), 4))
                return rewards
            good = [bool(one) and one[0] for one in right]
            for name, wanted_good in (("wrong length", False), ("right length", True)):
                lengths = [len(ids) for ids, one in zip(completion_ids, good, strict=True) if one == wanted_good]
                curves[name].append(round(sum(lengths) / len(lengths), 3) if lengths else None)
            curves["accuracy"].append(round(sum(good) / len(good), 4))
            return [float(one) for one in good]

        torch.manual_seed(seed)
        model = losses.tiny_mixture() if self.mixture else tiny_llama(VOCABULARY)
        bits = changes.get("bits", self.bits)
        engine = RoundedEngine(model, tokenizer(VOCABULARY), bits) if self.copies or bits else None
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=reward,
                args=GRPOConfig(output_dir=folder, seed=seed, **self.config(changes)),
                train_dataset=[{"prompt": one, "answer": answer(one, self.tokens)} for one in LETTERS] * 4,
                processing_class=tokenizer(VOCABULARY),
                engine=engine,
            )
            trainer.train()
            if save is not None:
                trainer.save_model(str(save))
        return {"curves": curves, "logs": {**history_logs(trainer.state.log_history), **_mismatch(trainer)}}


def _mismatch(trainer: Any) -> dict[str, list[list[float]]]:
    names = {
        "sampling/sampling_logp_difference/mean": "engine difference",
        "sampling/staleness/max": "staleness",
        "sampling/importance_sampling_ratio/outside": "outside",
    }
    return {
        short: [[one["step"], float(one[name])] for one in trainer.state.log_history if name in one]
        for name, short in names.items()
        if any(name in one for one in trainer.state.log_history)
    }


@dataclass(frozen=True)
class DistillationBed(TinyBed):
    """As `TinyBed`, with a teacher for the arms that set `teacher`: another seed's model, trained by their rewards.

    It is trained once, with `teacher_steps`, and stays in the parent of a run's folder.
    """

    name: ClassVar[str] = "tiny Llama with a teacher"
    teacher_steps: int = 300
    teacher_seed: int = 98

    def config(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return super().config({"teacher_coef": 1.0, **changes} if "teacher" in changes else changes)

    def run(self, arms: Arms, runs: Sequence[tuple[str, int]], folder: str) -> Runs:
        path = Path(folder).parent / "teacher"
        if not (path / "config.json").is_file():
            replace(self, steps=self.teacher_steps).train({}, self.teacher_seed, save=path)

        def own(arm: str) -> dict[str, Any]:
            return {name: str(path) if name == "teacher" else value for name, value in arms[arm].items()}

        return {(arm, seed): self.train(own(arm), seed) for arm, seed in runs}


@dataclass(frozen=True)
class RoundingBed:
    """Log-probs of sampling (one token at a time, with a cache) against those of a packed pass, SmolLM2-135M.

    An arm names a number format; a run finds, for each completion, the mean |difference| in nats over its tokens.
    """

    name: ClassVar[str] = "SmolLM2-135M, no training"
    at_once: ClassVar[int] = 1
    completions: int = 200
    tokens: int = 25
    group: int = 8

    def run(self, arms: Arms, runs: Sequence[tuple[str, int]], folder: str) -> Runs:
        return {(arm, seed): self.measure(str(arms[arm]["dtype"]), seed) for arm, seed in runs}

    def measure(self, dtype: str, seed: int) -> Result:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from covey.core.batch import collate
        from covey.core.engine import SamplingParams
        from covey.engines.native.engine import NativeEngine
        from covey.policy.loading import end_token_ids
        from covey.policy.scoring import TokenScorer
        from covey.rollout.collector import Collector, PromptSample
        from covey.rollout.prompts import PromptCodec

        path = model_path(None)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        ends = end_token_ids(model, tokenizer)
        engine = NativeEngine(lambda: model, eos_token_ids=ends, pad_token_id=tokenizer.pad_token_id)
        rows = task_rows("letters")[: self.completions // self.group]
        samples = [PromptSample(row, number, n) for number, row in enumerate(rows) for n in range(self.group)]
        params = SamplingParams(max_tokens=self.tokens)
        with torch.no_grad():
            with engine.awake():
                rollouts = Collector(engine, PromptCodec(tokenizer, None, None), seed=seed).collect(
                    samples, params, ("claim",)
                )
            batch = collate(rollouts)
            scorer = TokenScorer(lambda one: one, temperature=1.0, layout="packed", pad_token_id=tokenizer.pad_token_id)
            scores = scorer(model, batch).logprobs
        sampled = torch.cat([torch.tensor(one.logprobs) for one in rollouts])
        parts = (sampled - scores).abs().split([len(one.logprobs) for one in rollouts])
        return {
            "differences": [float(f"{one.mean():.6g}") for one in parts],
            "largest": float(f"{max(float(one.max()) for one in parts):.6g}"),
            "not finite": int((~torch.isfinite(scores)).sum() + (~torch.isfinite(sampled)).sum()),
            "tokens": len(sampled),
        }


@dataclass(frozen=True)
class RoutingBed:
    """Log-probs of an engine in bf16 against a trainer's pass over the same completions, of a tiny random model.

    An arm names the trainer's number format (`dtype`), the model (`mixture`, else a dense one with as many active
    channels) and the replay of the engine's experts (`replay`). A run finds for each completion the mean over its
    tokens of k3 = r - 1 - log r, r = p(trainer) / p(engine); and the share of (token, layer) pairs with other experts.
    """

    name: ClassVar[str] = "tiny mixture, no training"
    at_once: ClassVar[int] = 1
    completions: int = 512
    tokens: int = 32
    group: int = 8
    layers: int = 8
    experts: int = 32
    top_k: int = 4
    spread: float = 0.2  # standard deviation of the weights: a router that is far from uniform

    def run(self, arms: Arms, runs: Sequence[tuple[str, int]], folder: str) -> Runs:
        return {(arm, seed): self.measure(seed, **arms[arm]) for arm, seed in runs}

    def model(self, mixture: bool, seed: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

        sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": self.layers, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1}
        torch.manual_seed(seed)
        experts = {"num_local_experts": self.experts, "num_experts_per_tok": self.top_k, "intermediate_size": 32}
        model: Any = (
            MixtralForCausalLM(MixtralConfig(**sizes, **experts, bos_token_id=None))
            if mixture
            else LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32 * self.top_k, bos_token_id=None))
        )
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(std=self.spread)
        return model.eval().bfloat16()

    def measure(self, seed: int, dtype: str, mixture: bool = True, replay: bool = False) -> Result:
        import asyncio

        from covey.core.batch import collate
        from covey.core.engine import SampleRequest, SamplingParams
        from covey.core.records import Rollout
        from covey.core.routes import differing
        from covey.engines.native.engine import NativeEngine
        from covey.policy.scoring import TokenScorer

        model = self.model(mixture, seed)
        engine = NativeEngine(lambda: model, eos_token_ids={1}, pad_token_id=0)
        params = SamplingParams(max_tokens=self.tokens, keep_routes=mixture)
        random_ids = random.Random(seed)
        prompts = [[random_ids.randrange(2, 128) for _ in range(8)] for _ in range(self.completions // self.group)]

        async def sample() -> list[Any]:
            seeds = [[1000 * number + n for n in range(self.group)] for number in range(len(prompts))]
            asked = [SampleRequest(ids, self.group, params, own) for ids, own in zip(prompts, seeds, strict=True)]
            return await asyncio.gather(*map(engine.generate, asked))

        with torch.no_grad():
            with engine.awake():
                answers = asyncio.run(sample())
            rollouts = [
                Rollout(
                    ids, one.token_ids, [True] * len(one.token_ids), one.logprobs, "", one.finish, routes=one.routes
                )
                for ids, group in zip(prompts, answers, strict=True)
                for one in group
            ]
            trainer = model if dtype == "bfloat16" else model.float()
            batch = collate(rollouts)
            scored = batch if replay else batch.unrouted()
            scorer = TokenScorer(lambda one: one, temperature=1.0, layout="packed")
            scores = scorer(trainer, scored).logprobs.double()
            share = 0.0
            if mixture:
                routes = scorer.routes(trainer, scored)[1]
                share = differing(batch.routes, routes).double().mean().item()  # type: ignore[arg-type]
        logs = scores - torch.cat([torch.tensor(one.logprobs) for one in rollouts]).double()
        parts = (logs.exp() - 1 - logs).split([len(one.completion_ids) for one in rollouts])
        means = [float(f"{one.mean():.6g}") for one in parts]
        return {"k3": means, "differing": float(f"{share:.6g}"), "tokens": len(logs)}


@dataclass(frozen=True)
class WeightsBed:
    """Share of the weights of SmolLM2-135M that a step of AdamW leaves as they were in bf16; trained in float32.

    An arm sets the learning rate. A step has 2 prompts of a task with 8 completions of at most 3 tokens. `unchanged`
    has a number for each step: the share of weights that are equal in bf16 before and after it.
    """

    name: ClassVar[str] = "SmolLM2-135M, whole"
    at_once: ClassVar[int] = 1
    steps: int = 3
    task: str = "sum"

    def config(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in SETTINGS.items() if name != "peft"}
        return {**own, "max_steps": self.steps, "save_strategy": "no", "disable_tqdm": True, **changes}

    def run(self, arms: Arms, runs: Sequence[tuple[str, int]], folder: str) -> Runs:
        return {(arm, seed): self.measure(arms[arm], seed, folder) for arm, seed in runs}

    def measure(self, changes: Mapping[str, Any], seed: int, folder: str) -> Result:
        from transformers import TrainerCallback

        from covey import GRPOConfig, GRPOTrainer

        found: dict[str, list[float]] = {"unchanged": [], "unchanged below": []}

        class Compare(TrainerCallback):
            before: ClassVar[dict[str, torch.Tensor]] = {}

            def copy(self, model: Any) -> dict[str, torch.Tensor]:
                return {name: weight.detach().bfloat16() for name, weight in model.named_parameters()}

            def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **parts: Any) -> None:
                Compare.before = self.copy(model)

            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **parts: Any) -> None:
                same = small = all_small = total = 0
                for name, now in self.copy(model).items():
                    equal = now == Compare.before[name]
                    below = Compare.before[name].abs() < 512 * args.learning_rate
                    same, total = same + int(equal.sum()), total + equal.numel()
                    small, all_small = small + int((equal & below).sum()), all_small + int(below.sum())
                found["unchanged"].append(float(f"{same / total:.6g}"))
                found["unchanged below"].append(float(f"{small / max(all_small, 1):.6g}"))

        rows = task_rows(self.task)
        trainer = GRPOTrainer(
            model=model_path(None),
            reward_funcs=right_number,
            args=GRPOConfig(output_dir=folder, seed=seed, **self.config(changes)),
            train_dataset=rows,
            callbacks=[Compare()],
        )
        trainer.train()
        return found
