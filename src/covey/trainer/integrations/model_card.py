"""The model card of a trained model: what it is, how it was trained, what it scored, with which versions.

Text alone: where it is written and pushed is `covey.trainer.integrations.hub`. A method or loss of its own paper is a
row of `PAPERS`; one that is registered by a user is named without a citation.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from covey import __version__
from covey.observability.evaluations import all_sets, prefix, with_interval

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
}
"""By method or loss type: title and arXiv number."""

SHOWN = (
    "learning_rate",
    "num_generations",
    "generation_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "max_completion_length",
    "temperature",
    "loss_type",
    "beta",
    "epsilon",
    "lr_scheduler_type",
    "optim",
    "seed",
)
"""Settings that a card always tells; others where they differ from their defaults."""

PRIVATE = (
    "output_dir",
    "run_name",
    "resume_from_checkpoint",
    "report_to",
    "project",
    "trackio_space_id",
    "deepspeed",
    "fsdp_config",
    "accelerator_config",
    "debug",
    "disable_tqdm",
    "use_cpu",
)
"""Settings about a place rather than the training, with those about hubs, servers, logs and secrets."""

PRIVATE_STARTS = ("hub_", "push_to_hub", "logging_", "log_", "vllm_server_", "sglang_base", "trackio")
PRIVATE_ENDS = ("_token", "_key", "_secret", "_folder", "_url", "_path", "_dir")

PACKAGES = ("transformers", "torch", "accelerate", "datasets", "peft", "deepspeed", "vllm", "sglang")


@dataclass(frozen=True)
class CardFacts:
    """What a card tells.

    Attributes:
        name: of the model.
        base: hub id of the model that was trained; None for one that has none.
        method: `grpo` or `rloo`.
        adapter: the model is a PEFT adapter.
        sees_images: it is a vision-language model.
        datasets: hub ids.
        rewards: names of the reward functions.
        config: every setting and its value.
        defaults: every setting and its default.
        history: as in `trainer.state.log_history`.
        processes: how many trained.
        language, license: as the hub knows them.
        tags: further ones.
    """

    name: str
    base: str | None
    method: str
    adapter: bool
    datasets: Sequence[str]
    rewards: Sequence[str]
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    history: list[dict[str, Any]]
    processes: int = 1
    sees_images: bool = False
    language: str | Sequence[str] | None = None
    license: str | None = None
    tags: Sequence[str] = field(default_factory=tuple)


def model_card(facts: CardFacts) -> str:
    """The card as Markdown, with the metadata that the hub reads on top."""
    sections = [
        _metadata(facts),
        _introduction(facts),
        _quick_start(facts),
        _training(facts),
        _results(facts.history),
        _versions(),
        _citations(facts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _metadata(facts: CardFacts) -> str:
    import yaml

    values = {
        "base_model": facts.base,
        "library_name": "peft" if facts.adapter else "transformers",
        "pipeline_tag": _task(facts),
        "model_name": facts.name,
        "language": facts.language,
        "license": facts.license,
        "datasets": list(facts.datasets) or None,
        "tags": list(
            dict.fromkeys([*facts.tags, "generated_from_trainer", "covey", facts.method, "reinforcement-learning"])
        ),
    }
    given = {name: value for name, value in values.items() if value is not None}
    return f"---\n{yaml.safe_dump(given, sort_keys=False)}---"


def _introduction(facts: CardFacts) -> str:
    base = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else "a model without a hub id"
    data = " on " + ", ".join(f"[{one}](https://huggingface.co/datasets/{one})" for one in facts.datasets)
    what = "a PEFT adapter of" if facts.adapter else "a fine-tuned version of"
    return (
        f"# {facts.name}\n\nThis is {what} {base}, trained with {facts.method.upper()} by Covey {__version__}"
        f"{data if facts.datasets else ''}."
    )


def _task(facts: CardFacts) -> str:
    return "image-text-to-text" if facts.sees_images else "text-generation"


def _quick_start(facts: CardFacts) -> str:
    given, asked = "messages", '[{"role": "user", "content": "..."}]'
    if facts.sees_images:
        given = "text=messages"
        asked = '[{"role": "user", "content": [{"type": "image", "url": "..."}, {"type": "text", "text": "..."}]}]'
    return (
        "## Quick start\n\n```python\nfrom transformers import pipeline\n\n"
        f'generate = pipeline("{_task(facts)}", model="{facts.name}")\n'
        f"messages = {asked}\n"
        f'print(generate({given}, max_new_tokens=256, return_full_text=False)[0]["generated_text"])\n```'
    )


def _training(facts: CardFacts) -> str:
    papers = [f"[{PAPERS[key][0]}](https://arxiv.org/abs/{PAPERS[key][1]})" for key in _papers(facts)]
    rewards = ", ".join(f"`{name}`" for name in facts.rewards)
    rows = "\n".join(f"| `{name}` | {_cell(value)} |" for name, value in shown_settings(facts).items())
    return (
        f"## Training\n\nThe method is described in {' and in '.join(papers)}. Reward functions: {rewards}. Processes:"
        f" {facts.processes}.\n\n| setting | value |\n|---|---|\n{rows}"
    )


def shown_settings(facts: CardFacts) -> dict[str, Any]:
    """The settings that are told: the usual ones, and those that differ from their defaults; no places or secrets."""
    changed = [
        name
        for name, value in facts.config.items()
        if name in facts.defaults and value != facts.defaults[name] and not _is_private(name)
    ]
    return {
        name: facts.config[name] for name in dict.fromkeys([*SHOWN, *changed]) if facts.config.get(name) is not None
    }


def _is_private(name: str) -> bool:
    return name in PRIVATE or name.startswith(PRIVATE_STARTS) or name.endswith(PRIVATE_ENDS)


def _results(history: list[dict[str, Any]]) -> str:
    """The reward at first and at last, and what the last evaluation of each set said."""
    rewards = [(entry["step"], entry["reward"]) for entry in history if "reward" in entry and "step" in entry]
    rows = []
    if rewards:
        rows += [
            f"| training reward, step {step} | {reward:.4g} |"
            for step, reward in dict.fromkeys([rewards[0], rewards[-1]])
        ]
    latest: dict[str, Any] = {}
    for entry in history:
        latest.update({name: value for name, value in entry.items() if name.startswith("eval_")})
    for name in all_sets(history):
        start = prefix(name)
        metrics = {key.removeprefix(start): value for key, value in latest.items() if key.startswith(start)}
        label = f"evaluation {name}".rstrip()
        rows += [f"| {label}, reward | {metrics['reward']:.4g} |"] if "reward" in metrics else []
        rows += [f"| {label}, {estimate} (95% interval) | {text} |" for estimate, text in with_interval(metrics)]
    return "## Results\n\n| metric | value |\n|---|---|\n" + "\n".join(rows) if rows else ""


def _versions() -> str:
    found = {"covey": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return "## Versions\n\n" + "\n".join(f"- {name} {number}" for name, number in found.items())


def _citations(facts: CardFacts) -> str:
    entries = []
    for key in _papers(facts):
        title, number = PAPERS[key]
        entries.append(
            f"@misc{{{key},\n  title = {{{title}}},\n  eprint = {{{number}}},\n  archivePrefix = {{arXiv}}\n}}"
        )
    return "## Citations\n\n```bibtex\n" + "\n\n".join(entries) + "\n```"


def _papers(facts: CardFacts) -> list[str]:
    """The method's paper, and those of the loss and of the ratios where they are others'."""
    loss = facts.config.get("loss_type")
    by_sequence = str(facts.config.get("importance_sampling_level", "")).startswith("sequence")
    keys = [facts.method, loss, "gspo" if by_sequence and facts.method == "grpo" else None]
    return [key for key in dict.fromkeys(keys) if key in PAPERS]


def hub_id(name: Any) -> str | None:
    """`name` if it may be a hub id: not a folder, and not nothing."""
    text = str(name or "")
    return (
        text if text and not os.path.isdir(text) and text.count("/") <= 1 and not text.startswith((".", "/")) else None
    )


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
