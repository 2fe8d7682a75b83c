"""Errors of runs that do not start, as findings."""

from typing import Any

from covey.cli.config_file import RunConfig
from covey.cli.doctor.completions import FAMILIES, with_template
from covey.cli.train import build_trainer
from covey.observability.findings import Finding
from covey.rewards.contract import MissingArgument
from covey.runtime.process_memory import is_out_of_memory

TEXTS = {
    "has no chat template": ("template", "Set the tokenizer's chat_template to that of the model, or give text."),
    "tokens but the model embeds only": ("tokenizer-drift", "Save the model's own tokenizer into its folder."),
    "leaves no room to answer": ("prompt-round-trip", "Shorten or remove such rows, or take a longer context."),
    "leave no room to answer": ("prompt-round-trip", "Shorten or remove such rows, or take a longer context."),
    "names an end-of-sequence token": ("never-ends", "Set eos_token of the model's tokenizer."),
    "is empty: it encodes to no tokens": ("prompt-round-trip", "Use the model's own tokenizer, or remove the row."),
    "chat template cannot render": ("template", "Correct the tokenizer's chat_template, or the messages."),
    "all samples": ("reward-failing", "Correct the reward function."),
}
"""Part of a message: code and fix."""


def explain(error: Exception, run: RunConfig) -> Finding | None:
    """The finding that an error stands for; None for one that is no cause of poor learning."""
    text = str(error)
    if isinstance(error, MissingArgument):
        return Finding(
            "data-columns",
            "error",
            text.partition(" Rename")[0],
            "Rename the column (`columns: {old: new}` in the run file), or the argument.",
            "The trainer refuses to start.",
        )
    if is_out_of_memory(error):
        return Finding("memory", "error", text[:300], "Take a smaller model, peft, or fewer tokens in a micro-batch.")
    for part, (code, fix) in TEXTS.items():
        if part in text:
            proof = _with_a_template(run) if part == "has no chat template" else "The trainer refuses to start."
            return Finding(code, "error", text, fix, proof)
    return None


def _with_a_template(run: RunConfig) -> str:
    """Completions under the template of a family whose control tokens the tokenizer has."""
    from transformers import AutoTokenizer

    from covey.cli.doctor.examined import ExaminedRun

    tokenizer: Any = AutoTokenizer.from_pretrained(str(run.model))
    for name in FAMILIES:
        if with_template(tokenizer, name):
            trainer = build_trainer(run, processing_class=tokenizer)
            base = ExaminedRun(trainer, trainer.train_dataset, 40.0, {}).base
            ended = round((1 - base.cut) * len(base.rollouts))
            return (
                f"With the template of {name}, whose control tokens the tokenizer has, {ended} of"
                f" {len(base.rollouts)} completions end by themselves and the mean reward is {base.mean:.3g}."
            )
    return "The trainer refuses to start."
