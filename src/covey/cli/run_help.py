"""Help of the commands that train and evaluate. Imports neither torch nor transformers, which take seconds."""

import textwrap

from covey.cli.run_file import RUN_KEYS
from covey.config.declared import DeclaredField, field_groups

WIDTH = 100
INDENT = " " * 6

EVALUATE = """\
usage: covey eval --config run.yaml [--model FOLDER] [--field value ...]
Samples and scores the eval_dataset of a run file without training; the file is that of `covey grpo`.
Prints every estimate, and writes evaluation.json into output_dir, or into the folder that --model names.
With export_completions it also writes evaluations/, the completions."""


def usage(method: str) -> str:
    return (
        f"usage: covey {method} --config run.yaml [--field value ...]\n"
        f"`covey {method} -h` lists every setting, and `covey {method} --help` describes them all."
    )


def help_text(method: str, everything: bool = False) -> str:
    """Text of `-h`; with `everything`, also a description of every setting inherited from transformers."""
    parts = [[_introduction(method)], ["The run", *(_entry(key, "", text) for key, text in RUN_KEYS.items())]]
    listed: set[str] = set()
    for group in field_groups(method):
        fields = [field for field in group.fields if field.name not in listed]
        listed.update(field.name for field in fields)
        foreign = group.name == "TrainingArguments"
        if foreign and not everything:
            names = ", ".join(field.name for field in fields)
            title = "Settings of transformers.TrainingArguments (described with --help)"
            parts.append([title, textwrap.fill(names, WIDTH, initial_indent="  ", subsequent_indent="  ")])
        elif fields:
            title = "Settings of transformers.TrainingArguments" if foreign else group.title
            parts.append([title, *map(_field, fields)])
    return "\n\n".join("\n".join(part) for part in parts)


def _introduction(method: str) -> str:
    return textwrap.dedent(f"""\
        usage: covey {method} --config run.yaml [--field value ...]

        Train a model. The run file is YAML or JSON and holds any of the settings below; a flag wins over
        the file. Results go to `output_dir`: the model, report.html and record/.

        example run.yaml:
          model: HuggingFaceTB/SmolLM2-135M-Instruct
          dataset: questions.jsonl            # a column `prompt`; the others go to the reward functions
          reward_funcs: [numeric_match_reward, "rewards.py:brief"]
          output_dir: runs/first
          per_device_train_batch_size: 16
          num_generations: 8
          learning_rate: 1e-6

        `covey explain run.yaml` explains what it will do. On several processes:
          covey {method} --config run.yaml --accelerate_config fsdp2 --num_processes 8
        with one of cpu_2proc, multi_gpu, fsdp2, zero1, zero2, zero3, or an accelerate config of your own.""")


def _field(field: DeclaredField) -> str:
    return _entry(field.name, f"{field.type}, {field.default}", field.help)


def _entry(name: str, details: str, text: str) -> str:
    head = f"  --{name}" + (f"  ({details})" if details else "")
    body = textwrap.fill(text.replace("%%", "%"), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return f"{head}\n{body}" if text else head
