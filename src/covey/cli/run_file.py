"""A run as a file: a YAML or JSON mapping of config fields plus `RUN_KEYS`. Imports neither torch nor transformers."""

import argparse
import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from covey.config.aliases import ALIASES, hint
from covey.core.findings import CheckError
from covey.runtime.files import read_text, unique

RUN_KEYS = {
    "method": "`grpo` or `rloo`.",
    "model": "The model to train: a hub id or a folder.",
    "dataset": "Training prompts: a hub id, a json, jsonl, parquet or csv file, or a function without arguments that "
    "returns rows or a Dataset, as path/to/file.py:name.",
    "sources": "Several data sets by name, instead of `dataset`: each with `dataset`, `split`, `rows` (use "
    "only this many, from the first) and settings of its own, as in {sums: {dataset: sums.jsonl, weight: 2}}.",
    "dataset_split": "Split of the dataset to train on; a part of one as in `train[100:]`.",
    "columns": "Columns of the datasets to rename, as in {question: prompt, answer: solution}.",
    "system_prompt": "A system message before each prompt that has none; prompts of text become messages.",
    "eval_dataset": "Evaluation prompts: given like `dataset`, or several by name, each like it or a suite with "
    "sampling settings of its own, as in {hard: {dataset: hard.jsonl, num_generations: 8, pass_at: 8}}. Without it, no "
    "evaluation.",
    "reward_funcs": "Reward functions: built-in names, import paths (package.module.function), model ids or folders.",
    "tools": "Functions that the model may call, each as path/to/file.py:name or package.module:name.",
    "rollout_func": "A function that runs rollouts in place of the built-in loop, named like a tool.",
    "environment_factory": "A factory of the environments that rollouts act in, named like a tool, or several "
    "by name. With `max_steps` it needs no dataset.",
    "agent": "A program that plays each rollout, as a command, or a function named like a tool: the policy "
    "answers its requests to OPENAI_BASE_URL or ANTHROPIC_BASE_URL. With `max_steps` it needs no dataset.",
    "seats": "Opponents by name that rollout functions, games and programs play with, not trained: frozen, policy:n, "
    "{url: ..., model: ...} or a function, named like a tool.",
    "eval_seats": "Seats in evaluations; each replaces the one of the same name.",
    "peft": "Train a LoRA adapter instead of all weights: arguments of peft.LoraConfig (a mapping or JSON).",
    "quantization": "Store the weights under an adapter in 4 or 8 bits: arguments of BitsAndBytesConfig. As in "
    "{load_in_4bit: true, bnb_4bit_compute_dtype: bfloat16}; needs `peft`.",
}
"""Keys of a run file in addition to config fields."""

LISTS = ("reward_funcs", "tools")  # keys that take several values
MAPPINGS = ("columns", "seats", "eval_seats", "peft", "quantization", "sources")  # keys that take values by name
TEXTS = ("method", "model", "dataset", "dataset_split", "system_prompt")

OTHER_NAMES = {
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "train_dataset": "dataset",
    "dataset_train_split": "dataset_split",
    "peft_config": "peft",
    "quantization_config": "quantization",
    "resume": "resume_from_checkpoint",
}

SCRIPT_FLAGS = {
    "peft": {
        **{f"lora_{key}": key for key in ("r", "target_modules", "target_parameters", "task_type", "modules_to_save")},
        **{name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
    },
    "model_init_kwargs": {
        **dict.fromkeys(("dtype", "torch_dtype"), "dtype"),
        **{"model_revision": "revision", "attn_implementation": "attn_implementation"},
    },
    "quantization": {
        **{name: name for name in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage")},
        "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
    },
}
"""Flags of TRL's example scripts, by the mapping that they belong to and their name there."""


LAUNCH_FLAGS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids")
"""Flags that choose processes and machines, by their names in `accelerate launch`."""

FOREIGN_NAMES = (
    *("use_peft", "dataset_config", "reward_model_name_or_path", "advantage_estimator", "rlhf_type"),
    *(name for names in SCRIPT_FLAGS.values() for name in names),
)
"""Further names that run files and flags may have, which become others before a config is made."""


def refuse_unknown(names: Iterable[str], method: str, fields: Iterable[str]) -> None:
    """TypeError for names that are neither fields, old or other names of fields, nor `RUN_KEYS`."""
    known = [*fields, *ALIASES, *RUN_KEYS, *OTHER_NAMES]
    if unknown := [name for name in names if name not in known]:
        kind = f"no setting of a {method.upper()} run"
        raise TypeError(" ".join(f"`{name}` is {kind}{hint(name, known)}" for name in unknown))


def take_config(argv: list[str]) -> tuple[str | None, list[str]]:
    """The run file, given as `--config FILE` or as the first word, and the other flags."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found, rest = parser.parse_known_args(argv)
    return found.config, rest


def read_mapping(path: str | Path) -> dict[str, Any]:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no run file {str(path)!r}.")
    text, is_json = read_text(path), path.suffix == ".json"
    try:
        values = json.loads(text, object_pairs_hook=unique) if is_json else yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise CheckError.of("run-file", f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        evidence = f"{path} must hold `field: value` lines, but holds a {type(values).__name__}."
        raise CheckError.of("run-file", evidence)
    if others := [key for key in values if not isinstance(key, str)]:
        evidence = f"{path} has a key {others[0]!r}, but names of settings are text: put it in quotes."
        raise CheckError.of("run-file", evidence)
    return values


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses a key given twice, of which PyYAML would take the last, and numbers of base 8 or 60."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"`{name}` is in line {lines[name]} and in line {line}. Leave one out.")
            lines[name] = line
        return super().construct_mapping(node, deep)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    value = loader.construct_yaml_int(node)
    if re.match(r"[-+]?0\d|.*:", node.value):
        line = node.start_mark.line + 1
        raise yaml.YAMLError(f"{node.value} in line {line} would be {value} in YAML. Write a plain number, or quotes.")
    return value


_UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def yaml_value(text: str) -> Any:
    """The value of a flag or a field, written as YAML; ValueError if it cannot be read."""
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} cannot be read: {error}") from error


class FlagParser(argparse.ArgumentParser):
    """Argument parser whose errors are exceptions."""

    def error(self, message: str) -> Any:
        raise ValueError(re.sub(r"^argument (--[\w-]+)(/--[\w-]+)*", r"\1", message))  # the first spelling of a flag


# ---- places that a run names, checked without reading them -----------------------------------------------------------

BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""Suffixes of data files, and their builders in `datasets`."""


def is_function(spec: str) -> bool:
    """True for `path/to/file.py:name`."""
    return spec.rpartition(":")[0].endswith(".py")


def is_local(spec: str) -> bool:
    """True if `spec` names a file, a folder or a function, existing or not, rather than a data set of the hub."""
    if is_function(spec) or Path(spec).expanduser().exists() or Path(spec).suffix in BUILDERS:
        return True
    return spec.startswith((".", "/", "~")) or spec.count("/") > 1  # no hub id


def check_data_file(path: Path) -> None:
    """FileNotFoundError where there is no such file or folder, with the closest name in its folder."""
    if path.exists():
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"there is no data file or folder {str(path)!r} (there is no folder {str(path.parent)!r} either)."
        )
    close = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    end = f"; did you mean {str(path.with_name(close[0]))!r}?" if close else "."
    raise FileNotFoundError(f"there is no data file or folder {str(path)!r}{end}")


def evaluation_sets(given: Any) -> dict[str, Any]:
    """Evaluation sets by name; one without a name is called ""."""
    if not given:
        return {}
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = yaml_value(given)
    if isinstance(given, dict) and not isinstance(given.get("dataset"), str):
        return {str(name): entry for name, entry in given.items()}
    return {"": given}
