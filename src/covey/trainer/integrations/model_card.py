"""Model card of a trained model, from the template `model_card.md`."""

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey import __version__
from covey.observability.metric_docs import all_sets, metrics_of, with_interval
from covey.runtime.packages import versions

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


def model_card(
    trainer: Any, name: str, base: str | None, datasets: Sequence[str], tags: Sequence[str] = (), **metadata: Any
) -> str:
    """The card of a trainer's policy; `base` and `datasets` are hub ids, `metadata` the language and the license."""
    from huggingface_hub import ModelCard, ModelCardData

    args, config = trainer.args, trainer.args.to_dict()
    adapter, sees_images = hasattr(trainer.policy, "peft_config"), trainer.collector.codec.vision is not None
    task = "image-text-to-text" if sees_images else "text-generation"
    data = ModelCardData(
        base_model=base,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=task,
        model_name=name,
        datasets=list(datasets) or None,
        tags=[*tags, "generated_from_trainer", "covey", args.method, "reinforcement-learning"],
        **metadata,
    )
    defaults = {
        one.name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        for one in dataclasses.fields(args)
    }
    by_sequence = str(config.get("importance_sampling_level", "")).startswith("sequence")
    gspo = "gspo" if by_sequence and args.method == "grpo" else None
    cited = [args.method, config.get("loss_type"), gspo, config.get("advantages")]
    settings = shown_settings(config, defaults).items()
    keys = [key for key in dict.fromkeys(cited) if key in PAPERS]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        base=base,
        method=args.method,
        adapter=adapter,
        sees_images=sees_images,
        rewards=trainer.rewards.names,
        processes=args.world_size,
        task=task,
        data_sets=datasets,
        papers=[dict(zip(("key", "title", "number"), (key, *PAPERS[key]), strict=True)) for key in keys],
        settings={key: str(value).replace("|", "\\|").replace("\n", " ") for key, value in settings},
        results=_results(trainer.state.log_history),
        versions={"covey": __version__, "python": platform.python_version(), **versions(PACKAGES)},
    )
    return f"{card}\n"


def shown_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The usual settings and those that differ from their defaults, without places and secrets."""
    changed = [
        name
        for name, value in config.items()
        if name in defaults and value != defaults[name]
        if not (name in PRIVATE or name.startswith(PRIVATE_STARTS) or name.endswith(PRIVATE_ENDS))
    ]
    keys = [key for key in dict.fromkeys([*SHOWN, *changed]) if config.get(key) is not None]
    names = ("loss_type", "advantages")  # or the path of a file and a name
    return {key: os.path.basename(config[key]) if key in names else config[key] for key in keys}


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
