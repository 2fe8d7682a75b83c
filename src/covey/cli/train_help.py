"""The text of `covey grpo -h`: settings by theme, with the descriptions that the config's fields carry themselves."""

import dataclasses
import inspect
import textwrap
import types
import typing
from typing import Any, get_args, get_origin

from covey.cli.config_file import RUN_KEYS, config_of

WIDTH = 100
INDENT = " " * 6


def help_text(method: str, everything: bool = False) -> str:
    """Text of `-h`; with `everything`, also a description of every setting inherited from transformers."""
    from transformers import TrainingArguments

    config_class = config_of(method)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    parts = [[_introduction(method)], ["The run", *(_entry(key, "", text) for key, text in RUN_KEYS.items())]]
    listed: set[str] = set()
    for group in config_class.__mro__:
        names = [name for name in inspect.get_annotations(group) if name in fields and name not in listed]
        if group is TrainingArguments and not everything:
            title = "Settings of transformers.TrainingArguments (described with --help)"
            parts.append([title, textwrap.fill(", ".join(names), WIDTH, initial_indent="  ", subsequent_indent="  ")])
        elif names:
            title = (inspect.getdoc(group) or group.__name__).splitlines()[0]
            if group is TrainingArguments:
                title = "Settings of transformers.TrainingArguments"
            parts.append([title, *(_field(fields[name]) for name in names)])
        listed.update(names)
    return "\n\n".join("\n".join(part) for part in parts)


def _introduction(method: str) -> str:
    return textwrap.dedent(f"""\
        usage: covey {method} --config run.yaml [--field value ...]

        Train a model. The run file is YAML or JSON and holds any of the settings below; a flag wins over
        the file. Results go to `output_dir`: the model, curves.png, summary.html and completions/.

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


def _field(field: dataclasses.Field) -> str:
    default = field.default if field.default is not dataclasses.MISSING else None
    shown = "unset" if default is None else repr(default)
    return _entry(field.name, f"{type_name(field.type)}, {shown}", field.metadata.get("help", ""))


def _entry(name: str, details: str, text: str) -> str:
    head = f"  --{name}" + (f"  ({details})" if details else "")
    body = textwrap.fill(text.replace("%%", "%"), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return f"{head}\n{body}" if text else head


def type_name(annotation: Any) -> str:
    """A type as a user would write it, without None: `list` for `list[str] | None`."""
    if isinstance(annotation, str):
        return annotation
    union = get_origin(annotation) in (types.UnionType, typing.Union)
    parts = [part for part in get_args(annotation) if part is not type(None)] if union else [annotation]
    return " | ".join(dict.fromkeys(getattr(get_origin(part) or part, "__name__", str(part)) for part in parts))
