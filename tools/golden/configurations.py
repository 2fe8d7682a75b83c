"""Named runs that are compared between commits.

A run is a function of an output folder that trains for six steps and returns the trainer. Only names that users have
stand here: a configuration must run unchanged on commits before and after a refactoring. To add one, add an entry to
`RUNS`; parts that are expensive to build, or imported from Covey's packages, are `Lazy`, so that one that fails costs
its own run only.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from covey import EvalSuite, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from . import parts as p

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 16,  # long enough for some completions to end by themselves
    "max_steps": 6,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "ddp_timeout": 120,
    "disable_tqdm": True,
}
CHECKPOINTS = "GOLDEN_CHECKPOINTS"
"""Environment variable: a folder in which OLD leaves checkpoints for NEW, by the names of configurations."""


@dataclass(frozen=True)
class Run:
    """A named run.

    Attributes:
        train: from an output folder to the trainer, trained.
        launch: "one" process, or two of "ddp" or "fsdp". Runs of the same launch share processes.
    """

    train: Callable[[Path], Any]
    launch: str = "one"


@dataclass(frozen=True)
class Lazy:
    """A part of a trainer that is built when its run begins."""

    build: Callable[[], Any]


def trainer(output: Path, method: str = "grpo", parts: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A trainer of a tiny model; `parts` are trainer arguments, `settings` config fields."""
    kind, config = (GRPOTrainer, GRPOConfig) if method == "grpo" else (RLOOTrainer, RLOOConfig)
    given = {"reward_funcs": p.longer, **(parts or {})}
    given = {name: part.build() if isinstance(part, Lazy) else part for name, part in given.items()}
    if "vision" in given:
        given["model"], given["processing_class"] = given.pop("vision")
    given.setdefault("model", p.language_model())
    given.setdefault("processing_class", p.tokenizer())
    given.setdefault("train_dataset", p.rows())
    if "judge" in given:
        model, tokenizer = given.pop("judge")
        given |= {"reward_funcs": [p.longer, model], "reward_processing_classes": [None, tokenizer]}
    return kind(args=config(output_dir=str(output), **{**SETTINGS, **settings}), **given)


def run(method: str = "grpo", *, launch: str = "one", evaluate: bool = False, **settings: Any) -> Run:
    """A run from its settings; see `trainer`."""

    def train(output: Path) -> Any:
        trained = trainer(output, method, **settings)
        trained.train()
        if evaluate:
            trained.evaluate()
        return trained

    return Run(train, launch)


def lora(**changes: Any) -> Lazy:
    """An adapter whose weights are not zero at the start."""

    def make() -> Any:
        from peft import LoraConfig

        return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **changes)

    return Lazy(make)


def conversation(*turns: Any, **parts: Any) -> dict[str, Any]:
    """Settings of a run whose policy follows a script in conversations with tools or environments."""
    scripted = Lazy(lambda: p.Scripted(p.talk(*turns)))
    parts = {"train_dataset": p.rows(conversational=True), "engine": scripted, **parts}
    return {"parts": parts, "max_completion_length": 150, "engine_parity": "off"}


def squared(x: Any) -> Any:
    """A loss of the user's own: a quadratic penalty in place of clipping."""
    return (x.ratio - 1) ** 2 / 2 - x.ratio * x.advantages


def custom_loss(output: Path) -> Any:
    from covey.algorithms import register_loss

    register_loss("golden_squared", squared)
    trained = trainer(output, loss_type="golden_squared", **OFF_POLICY)
    trained.train()
    return trained


def resumed(output: Path, checkpoint: Path, **settings: Any) -> Any:
    """Train three steps, unless their checkpoint is there, and the other three from the checkpoint."""
    if not checkpoint.exists():
        trainer(output / "first", **settings, save_strategy="steps", save_steps=3, max_steps=3).train()
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(output / "first" / "checkpoint-3", checkpoint)
    p.SAMPLES.clear()  # a run from another commit's checkpoint has none of the first steps
    trained = trainer(output / "second", **settings)
    trained.train(resume_from_checkpoint=str(checkpoint))
    return trained


def resume(method: str = "grpo", **settings: Any) -> Run:
    return Run(lambda output: resumed(output, output / "checkpoint", method=method, **settings))


def resume_old(method: str = "grpo", **settings: Any) -> Run:
    """A run that continues a checkpoint of OLD: old checkpoints must resume."""

    def train(output: Path) -> Any:
        return resumed(output, Path(os.environ[CHECKPOINTS]) / output.name, method=method, **settings)

    return Run(train)


def first(text: str) -> str | None:
    """The answer that a completion votes for."""
    return text[:1] or None


def suites() -> dict[str, Any]:
    estimates = {"pass_at": (1, 2), "maj_at": 3, "success_threshold": 6.5, "answer": first}
    return {
        "few": EvalSuite(p.rows(3), num_generations=3, **estimates),
        "greedy": EvalSuite(p.rows(5), temperature=0, pass_at=1, success_threshold=6.5),
        "plain": p.rows(2),
    }


OFF_POLICY = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2}
REFERENCE = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
# User code runs on a thread of its own, so timing decides which turns of concurrent rollouts are decoded in one batch,
# and with that the last bit of their log-probs and entropies. Sequences that are decoded alone do not depend on it.
ALONE = {"max_concurrent_completions": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}
DIFFICULT = {"parts": {"reward_funcs": p.for_odd_prompts}, "dynamic_sample": True, "max_resample_times": 2}
CHOSEN = {**DIFFICULT, "prompt_sampler": "difficulty"}
REFILLED = {**CHOSEN, **OFF_POLICY}
STEPS = {"parts": {"reward_funcs": [p.by_steps, p.longer]}, "process_weight": 0.5, "step_discount": 0.9}
ADAPTER = {"parts": {"peft_config": lora()}}
IMAGES = {"train_dataset": p.rows_with_images()}
MIXED = {
    "reward_funcs": [p.longer, p.sometimes_none, p.waits, p.sometimes_fails],
    "train_dataset": p.rows(),
}
TOOL_TURNS = (
    [p.call("add", a=2, b=3), p.call("halve", a=3), "none", p.call("ad", a=1), "<tool_call>{broken</tool_call>"],
    [p.call("halve", a=4), "done "],
    ["done "],
)

RUNS: dict[str, Run] = {
    # -- losses and methods
    "grpo": run(),
    "grpo_off_policy": run(**OFF_POLICY, epsilon_high=0.28, delta=4.0),
    "grpo_reference": run(loss_type="grpo", **REFERENCE),
    "grpo_kl_estimators": run(beta=0.1, kl_estimator="k1", use_bias_correction_kl=True, **OFF_POLICY),
    "rloo": run("rloo"),
    "rloo_off_policy": run("rloo", normalize_advantages=True, reward_clip_range=(0.0, 16.5), **OFF_POLICY),
    "loss_dr_grpo": run(loss_type="dr_grpo", scale_rewards="none", **OFF_POLICY),
    "loss_bnpo": run(loss_type="bnpo", scale_rewards="batch", **OFF_POLICY),
    "loss_cispo": run(loss_type="cispo", epsilon_high=5.0, **OFF_POLICY),
    "loss_sapo": run(loss_type="sapo", **OFF_POLICY),
    "loss_luspo": run(loss_type="luspo", importance_sampling_level="sequence", **OFF_POLICY),
    "loss_vespo": run(loss_type="vespo", **OFF_POLICY),
    "loss_gmpo": run(loss_type="gmpo", **OFF_POLICY),
    "loss_gspo": run(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, **OFF_POLICY),
    "loss_custom": Run(custom_loss),
    "entropy": run(top_entropy_quantile=0.5, use_adaptive_entropy=True, entropy_coef=0.01, entropy_target=9.0),
    "filters": run(
        off_policy_mask_threshold=0.5, mask_truncated_completions=True, max_completion_length=80, **OFF_POLICY
    ),
    "corrected": run(correct_built_in_engine=True, vllm_importance_sampling_mode="sequence_mask", **OFF_POLICY),
    # -- models and layouts
    "lora": run(**ADAPTER, beta=0.05),
    "lora_rloo": run("rloo", parts={"peft_config": lora(lora_dropout=0.1)}, **OFF_POLICY),
    "moe": run(parts={"model": Lazy(p.mixture_of_experts)}, router_aux_loss_coef=0.2),
    "hybrid": run(parts={"model": Lazy(p.hybrid)}),
    "images": run(parts={"vision": Lazy(p.gemma3), **IMAGES}, beta=0.05),
    "images_any_size": run(parts={"vision": Lazy(p.qwen2_vl), **IMAGES}, freeze_vit=True, **OFF_POLICY),
    "layout_padded": run(attn_layout="padded", beta=0.05),
    "layout_packed": run(attn_layout="packed", beta=0.05),
    "small_passes": run(max_tokens_per_micro_batch=30, gradient_checkpointing=True, logprob_chunk_size=8),
    "bf16": run(bf16=True, cast_lm_head_to_fp32=True, beta=0.05),
    # -- sampling
    "sampling_cuts": run(top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, temperature=0.8),
    "conversations": run(parts={"train_dataset": p.rows(conversational=True)}, max_concurrent_completions=3),
    "speculative_exact": run(parts={"reward_funcs": p.even}, speculative_reuse="exact", max_steps=8),
    "speculative_lenient": run(
        parts={"reward_funcs": p.even, "train_dataset": p.rows(4)},
        speculative_reuse="lenient",
        speculative_lenience=1.5,
    ),
    "dynamic_sampling": run(**DIFFICULT),
    "difficulty": run(**CHOSEN, max_steps=8),
    "stream": run(parts={"train_dataset": Lazy(lambda: Dataset.from_list(p.rows(6)).to_iterable_dataset())}),
    "staleness_scripted": run(
        parts={"engine": Lazy(lambda: p.Scripted(p.letters))}, max_staleness=2, engine_parity="off", **OFF_POLICY
    ),
    "staleness_copy": run(parts={"engine": Lazy(lambda: p.PolicyCopy(p.language_model()))}, max_staleness=1),
    "engine_copy": run("rloo", parts={"engine": Lazy(lambda: p.PolicyCopy(p.language_model()))}, **OFF_POLICY),
    # -- rewards
    "rewards": run(parts=MIXED, reward_weights=[1.0, 0.5, 2.0, 1.0], log_completions=False),
    "rewards_normalized": run(parts=MIXED, multi_objective_aggregation="normalize_then_sum"),
    "rewards_built_in": run(parts={"reward_funcs": Lazy(p.built_in), "train_dataset": p.rows(conversational=True)}),
    "rewards_streamed": run(parts={"reward_funcs": Lazy(p.streamed)}, stream_rewards=True),
    "reward_model": run(parts={"judge": Lazy(p.reward_model)}),
    "step_credit": run(**STEPS),
    "step_credit_rloo": run("rloo", **{**STEPS, "parts": {"reward_funcs": [p.by_steps, p.by_turns]}}, **OFF_POLICY),
    # -- agents
    "tools": run(**conversation(*TOOL_TURNS, tools=[p.add, p.halve]), max_tool_calling_iterations=3),
    "tools_rloo": run("rloo", **conversation(*TOOL_TURNS, tools=[p.add]), max_tool_calling_iterations=1),
    "environment": run(
        **conversation([p.call("add", by=2), p.call("add", by=5), "no"], ["done "], environment_factory=p.Counter)
    ),
    "environment_text": run(
        parts={"environment_factory": p.Talk, "train_dataset": p.rows(conversational=True)},
        max_completion_length=40,
        **ALONE,
    ),
    "rollout_func": run(parts={"rollout_func": p.twice, "train_dataset": p.rows(conversational=True)}, **ALONE),
    "rollout_func_group": run(parts={"rollout_func": p.tree}, **ALONE),
    "rollout_func_batch": run("rloo", parts={"rollout_func": p.second_drafts}, **ALONE),
    # -- evaluation
    "evaluation": run(parts={"eval_dataset": Lazy(suites)}, **EVALUATED, evaluate=True),
    # -- checkpoints
    "resumed": resume(**OFF_POLICY, **REFERENCE),
    "resumed_refilled": resume(**REFILLED),
    "resumed_lora": resume("rloo", **ADAPTER),
    "old_checkpoint": resume_old(**OFF_POLICY, **REFERENCE),
    "old_checkpoint_refilled": resume_old(**REFILLED),
    # -- two processes
    "ddp": run(launch="ddp", per_device_train_batch_size=2, beta=0.05, max_tokens_per_micro_batch=60),
    "ddp_rloo_lora": run("rloo", launch="ddp", per_device_train_batch_size=2, **ADAPTER, **OFF_POLICY),
    "ddp_dynamic": run(launch="ddp", per_device_train_batch_size=2, **CHOSEN),
    "ddp_steps": run(launch="ddp", per_device_train_batch_size=2, **STEPS),
    "ddp_evaluation": run(
        launch="ddp",
        per_device_train_batch_size=2,
        parts={"eval_dataset": Lazy(suites)},
        **{**EVALUATED, "per_device_eval_batch_size": 2},
    ),
    "ddp_images": run(
        launch="ddp", per_device_train_batch_size=2, parts={"vision": Lazy(p.gemma3), **IMAGES}, beta=0.05
    ),
    "fsdp": run(launch="fsdp", per_device_train_batch_size=2, fsdp=True, beta=0.05, max_tokens_per_micro_batch=60),
    "fsdp_rloo_lora": run("rloo", launch="fsdp", per_device_train_batch_size=2, fsdp=True, **ADAPTER, **OFF_POLICY),
}
