"""Model card of a trained model, from the template `model_card.md`."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey import __version__
from covey.observability.metric_docs import all_sets, metrics_of, with_interval
from covey.observability.record import versions

TEMPLATE = Path(__file__).with_name("model_card.md")
PAPERS: dict[str, tuple[str, str]] = {
    "grpo": ("DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", "2402.03300"),
    "rloo": (
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "2402.14740",
    ),
    "dapo": ("DAPO: An Open-Source LLM Reinforcement Learning System at Scale", "2503.14476"),
    "dr_grpo": ("Understanding R1-Zero-Like Training: A Critical Perspective", "2503.20783"),
    "cispo": ("MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", "2506.13585"),
    "gspo": ("Group Sequence Policy Optimization", "2507.18071"),
    "gmpo": ("Geometric-Mean Policy Optimization", "2507.20673"),
    "sapo": ("Soft Adaptive Policy Optimization", "2511.20347"),
    "luspo": ("LUSPO", "2602.05261"),
    "vespo": ("VESPO", "2602.10693"),
    **dict.fromkeys(
        ("dppo_tv", "dppo_kl"), ("Rethinking the Trust Region in LLM Reinforcement Learning", "2602.04879")
    ),
    "gpg": ("GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", "2504.02546"),
    "dro": ("Offline Regularised Reinforcement Learning for Large Language Models Alignment", "2405.19107"),
    **dict.fromkeys(
        ("kl_cov", "clip_cov"),
        ("The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", "2505.22617"),
    ),
    **dict.fromkeys(
        ("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        ("REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models", "2501.03262"),
    ),
    "maxrl": ("Maximum Likelihood Reinforcement Learning", "2602.02710"),
    "opo": ("On-Policy RL with Optimal Reward Baseline", "2505.23585"),
    "pass_at_k": (
        "Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large Reasoning Models",
        "2508.10751",
    ),
    "otb": ("The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL", "2602.07078"),
}  # by method, loss type or advantages: title and arXiv number

SHOWN = (
    *("learning_rate", "num_generations", "generation_batch_size", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "num_iterations", "max_completion_length", "temperature", "loss_type", "beta"),
    *("epsilon", "lr_scheduler_type", "optim", "seed"),
)  # settings that a card always lists; others where they differ from their defaults

PRIVATE = (
    *("output_dir", "run_name", "resume_from_checkpoint", "report_to", "project", "trackio_space_id", "deepspeed"),
    *("fsdp_config", "accelerator_config", "debug", "disable_tqdm", "use_cpu"),
)  # settings of a place rather than of the training; those about hubs, servers, logs and secrets follow
PRIVATE_STARTS = ("hub_", "push_to_hub", "logging_", "log_", "vllm_server_", "sglang_base", "trackio")
PRIVATE_ENDS = ("_token", "_key", "_secret", "_folder", "_url", "_path", "_dir")
PACKAGES = ("transformers", "torch", "accelerate", "datasets", "peft", "deepspeed", "vllm", "sglang")


@dataclass(frozen=True)
class CardFacts:
    name: str
    base: str | None  # hub id of the model that was trained
    method: str  # `grpo` or `rloo`
    adapter: bool  # the model is a PEFT adapter
    datasets: Sequence[str]  # hub ids
    rewards: Sequence[str]  # names of the reward functions
    config: Mapping[str, Any]  # every setting and its value
    defaults: Mapping[str, Any]
    history: list[dict[str, Any]]  # as in `trainer.state.log_history`
    processes: int = 1
    sees_images: bool = False
    language: str | list[str] | None = None  # as the hub names it, like the license
    license: str | None = None
    tags: Sequence[str] = ()


def model_card(facts: CardFacts) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    task = "image-text-to-text" if facts.sees_images else "text-generation"
    metadata = ModelCardData(
        base_model=facts.base,
        library_name="peft" if facts.adapter else "transformers",
        pipeline_tag=task,
        model_name=facts.name,
        language=facts.language,
        license=facts.license,
        datasets=list(facts.datasets) or None,
        tags=[*facts.tags, "generated_from_trainer", "covey", facts.method, "reinforcement-learning"],
    )
    names = ("name", "base", "method", "adapter", "sees_images", "rewards", "processes")
    settings = shown_settings(facts).items()
    by_sequence = str(facts.config.get("importance_sampling_level", "")).startswith("sequence")
    gspo = "gspo" if by_sequence and facts.method == "grpo" else None
    cited = [facts.method, facts.config.get("loss_type"), gspo, facts.config.get("advantages")]
    keys = [key for key in dict.fromkeys(cited) if key in PAPERS]
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        task=task,
        data_sets=facts.datasets,
        papers=[dict(zip(("key", "title", "number"), (key, *PAPERS[key]), strict=True)) for key in keys],
        settings={name: str(value).replace("|", "\\|").replace("\n", " ") for name, value in settings},
        results=_results(facts.history),
        versions={"covey": __version__, "python": platform.python_version(), **versions(PACKAGES)},
        **{name: getattr(facts, name) for name in names},
    )
    return f"{card}\n"


def shown_settings(facts: CardFacts) -> dict[str, Any]:
    """The usual settings and those that differ from their defaults, without places and secrets."""
    changed = [
        name
        for name, value in facts.config.items()
        if name in facts.defaults and value != facts.defaults[name]
        if not (name in PRIVATE or name.startswith(PRIVATE_STARTS) or name.endswith(PRIVATE_ENDS))
    ]
    keys = [key for key in dict.fromkeys([*SHOWN, *changed]) if facts.config.get(key) is not None]
    names = ("loss_type", "advantages")  # or the path of a file and a name
    return {key: os.path.basename(facts.config[key]) if key in names else facts.config[key] for key in keys}


def _results(history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    rewards = [(entry["step"], entry["reward"]) for entry in history if "reward" in entry and "step" in entry]
    ends = dict.fromkeys([rewards[0], rewards[-1]]) if rewards else {}
    results = [(f"training reward, step {step}", f"{reward:.4g}") for step, reward in ends]
    latest = {key: value for entry in history for key, value in entry.items() if key.startswith("eval_")}
    for name in all_sets(history):
        label, metrics = f"evaluation {name}".rstrip(), metrics_of(name, latest)
        if "reward" in metrics:
            results.append((f"{label}, reward", f"{metrics['reward']:.4g}"))
        results += [(f"{label}, {estimate} (95% interval)", text) for estimate, text in with_interval(metrics)]
    return results


def hub_id(name: Any) -> str | None:
    """The name if it can be a hub id; None for a folder or an empty name."""
    text = str(name or "")
    local = not text or os.path.isdir(text) or text.count("/") > 1 or text.startswith((".", "/"))
    return None if local else text
