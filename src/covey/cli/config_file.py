"""A run as a config: the values of a run file and of the flags that override it, in the types of their fields."""

import argparse
import ast
import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArgumentParser, string_to_bool

from covey.cli.run_file import (
    LISTS,
    MAPPINGS,
    OTHER_NAMES,
    RUN_KEYS,
    SCRIPT_FLAGS,
    TEXTS,
    FlagParser,
    read_mapping,
    refuse_unknown,
    yaml_value,
)
from covey.config.algebra import planning_for
from covey.config.aliases import ALIASES, Alias, check_estimator, without_usual
from covey.config.base import OnlineConfig
from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig
from covey.core.findings import CheckError, Finding
from covey.runtime.user_code import report, warn


@dataclasses.dataclass
class RunConfig:
    """A run of a file and flags: its `RUN_KEYS`, as written, and its config."""

    args: OnlineConfig
    method: str
    model: str | None = None
    dataset: str | None = None
    sources: dict[str, Any] | None = None
    dataset_split: str = "train"
    columns: dict[str, Any] | None = None
    system_prompt: str | None = None
    eval_dataset: Any = None
    reward_funcs: list[Any] = dataclasses.field(default_factory=list)
    tools: list[Any] = dataclasses.field(default_factory=list)
    rollout_func: Any = None
    environment_factory: Any = None
    agent: Any = None
    seats: dict[str, Any] | None = None
    eval_seats: dict[str, Any] | None = None
    peft: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None

    @property
    def needed(self) -> list[str]:
        """Keys that a run requires. Environments may have a reward and prompts of their own."""
        data = [] if self.sources else ["dataset"]
        if not self.environment_factory and not self.agent:
            own = [bool(one.get("reward_funcs")) for one in (self.sources or {}).values() if isinstance(one, dict)]
            rewarded = self.args.teacher is not None or (own and all(own))
            return ["model", *data, *([] if rewarded else ["reward_funcs"])]
        return ["model"] if self.args.max_steps > 0 else ["model", *data]

    @property
    def rewarded(self) -> bool:
        """False if the run names nothing that gives rewards, as a run that learns from its teacher alone."""
        of_sources = any(one.get("reward_funcs") for one in (self.sources or {}).values() if isinstance(one, dict))
        return bool(self.reward_funcs or of_sources or self.environment_factory or self.agent)

    def missing(self, *names: str) -> Iterator[Finding]:
        """An error for each of the keys `names` that the run does not set."""
        for name in names:
            if not getattr(self, name):
                yield Finding.error(
                    "run-incomplete",
                    f"the run names no `{name}`. {RUN_KEYS[name]}",
                    f"Write `{name}: ...` into the run file or pass `--{name} ...`."
                    f"{' Without a dataset, set `max_steps`.' * (name == 'dataset' and 'reward_funcs' not in names)}",
                )


def load_run(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] = (),
    *,
    method: str | None = None,
    world_size: int | None = None,
    gpu: bool = False,
) -> RunConfig:
    """Read a run file (None: flags alone) or take its values, apply flags on top (`--field value`), and make a config.

    A command may fix the `method`; batch sizes are resolved for `world_size` processes, None: those that are running;
    precision for the hardware of this machine, or for a `gpu`.
    An unknown key is a `TypeError`, a file or flag that cannot be read or a config that cannot work a `CheckError`.
    """
    read = dict(path) if isinstance(path, Mapping) else read_mapping(path) if path is not None else {}
    for other, name in OTHER_NAMES.items():
        if other in read and read.get(name, read[other]) != read[other]:
            evidence = f"`{name}` and `{other}` are two names of one setting, and differ: leave one out."
            raise CheckError.of("settings-contradict", evidence)
    flags = parse_flags(overrides)
    given = {new_name(name) for name in flags}
    read = {name: value for name, value in read.items() if new_name(name) not in given}  # a flag wins
    values = {**{OTHER_NAMES.get(name, name): value for name, value in read.items()}, **flags}
    _read_script_flags(values)
    for name in TEXTS:
        if not isinstance(values.get(name), str | None):
            evidence = f"{name}={values[name]!r} must be text, not a {type(values[name]).__name__}."
            raise CheckError.of("setting-type", evidence)
    method = _settle_method(values, method)
    config_class = config_of(method)
    run = {key: values.pop(key) for key in list(values) if key in RUN_KEYS}
    values = without_usual(values)
    refuse_unknown(values, method, [field.name for field in dataclasses.fields(config_class)])
    with planning_for(world_size, gpu):
        args = config_class(**typed(values, config_class))
    if isinstance(run.get("model"), str):
        run["model"] = os.path.expanduser(run["model"])
    if run.get("dataset") and run.get("sources"):
        evidence = "the run names a `dataset` and `sources`: leave one out, or make the dataset one of the sources."
        raise CheckError.of("settings-contradict", evidence)
    if not run.get("dataset"):
        unread = ("dataset_split",) if run.get("sources") else ("dataset_split", "columns", "system_prompt")
        for name in unread[:1] if run.get("eval_dataset") else unread:
            if run.get(name):
                report([Finding.warning("setting-unread", f"`{name}` has no effect: the run has no dataset.")])
    run |= {name: _as_list(run.get(name) or []) for name in LISTS}
    run |= {name: _as_mapping(name, run.get(name)) for name in MAPPINGS}
    run["peft"] = run["peft"] and _with_lists(run["peft"])
    run["dataset_split"] = run.get("dataset_split") or "train"
    return RunConfig(args, method, **run)


OF_THE_MACHINE = ("dataloader_pin_memory",)
"""Settings that transformers changes by itself, as on a CPU."""


def new_name(name: str) -> str:
    alias = ALIASES.get(name)
    return OTHER_NAMES.get(name) or (alias and alias.new) or name


def idle_flags(flags: Sequence[str], names: Collection[str], because: str) -> Iterator[Finding]:
    """Warnings of flags that change nothing in what a command does."""
    for name in parse_flags(flags):
        if new_name(name) in names:
            yield Finding.warning("setting-unread", f"`--{name}` has no effect: {because}.")


def parts_of_record(described: Mapping[str, Any]) -> dict[str, Any]:
    """The method and other keys of a run that a record's run.json names."""
    return {"method": "grpo", **{name: value for name, value in (described.get("parts") or {}).items() if value}}


def settings_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a record's run.json that differ from their defaults."""
    config = config_of(parts_of_record(described)["method"])
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.name not in OF_THE_MACHINE}
    values = {}
    for name, text in described["settings"].items():
        with suppress(ValueError, SyntaxError):  # an object without a text that could be read again
            value = float(text) if text in ("inf", "-inf") else ast.literal_eval(text)
            if name in defaults and value != defaults[name] and value is not None:
                values[name] = value
    return values


def config_of(method: str) -> type[OnlineConfig]:
    classes: dict[str, type[OnlineConfig]] = {"grpo": GRPOConfig, "rloo": RLOOConfig}
    if method not in classes:
        advice = "choose one of: " + ", ".join(classes) + "."
        if method in ("gkd", "distillation", "sdft", "sdpo", "opd"):
            advice = (
                "distillation is GRPO with a `teacher`: `method: grpo`, `teacher_loss: divergence`,"
                " `teacher_top_k: -1`, and without `reward_funcs` `num_generations: 1`."
            )
        raise CheckError.of("setting-word", f"method={method!r} is not known;", advice)
    return classes[method]


def flag_parser(config_class: type[OnlineConfig]) -> argparse.ArgumentParser:
    class Parser(FlagParser, HfArgumentParser):
        pass

    parser = Parser([config_class], add_help=False, allow_abbrev=False)  # type: ignore[list-item]
    for key, help in RUN_KEYS.items():
        parser.add_argument(f"--{key}", nargs="+" if key in LISTS else None, help=help)
    for other, key in OTHER_NAMES.items():
        parser.add_argument(f"--{other}", dest=key, help=argparse.SUPPRESS)
    fields = {field.name for field in dataclasses.fields(config_class)}
    for flag in ["use_peft", *(name for names in SCRIPT_FLAGS.values() for name in names)]:
        parser.add_argument(f"--{flag}", nargs="*", type=yaml_value, help=argparse.SUPPRESS)
    for flag in ("dataset_config", "reward_model_name_or_path"):
        parser.add_argument(f"--{flag}", help=argparse.SUPPRESS)
    for old in [*ALIASES, "advantage_estimator", "rlhf_type"]:
        if old not in fields:
            parser.add_argument(f"--{old}", nargs="?", const=True, type=yaml_value, help=argparse.SUPPRESS)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        if action.dest in ("optim_target_modules", "report_to"):  # a word or several
            action.nargs = "+"
        elif action.dest == "reward_weights":
            action.type = str  # several of them may be in one word
    return parser


def _numbers(parts: Any) -> Any:
    """Numbers of texts such as `1,2`; anything else as it is, for the rule that names what is wrong with it."""
    texts = [str(part).strip("[]() ") for part in (parts if isinstance(parts, list) else [parts])]
    try:
        return [float(number) for text in texts for number in re.split(r"[\s,]+", text) if number]
    except ValueError:
        return parts


def parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Values of the given flags, as `typed` takes them; unknown flags have the value None."""
    if not flags:
        return {}
    flags = [re.sub(r"^--[\w-]+(?==|$)", lambda flag: f"--{flag[0][2:].replace('-', '_')}", word) for word in flags]
    parser = flag_parser(RLOOConfig)  # the class with the most fields
    known = parser._option_string_actions
    for place, word in enumerate(flags):  # --no_name sets any field of True and False
        flag = known.get(f"--{word[5:]}") if word.startswith("--no_") and word not in known else None
        if flag and (flag.nargs in ("?", "*") or flag.type is string_to_bool):
            flags[place] = f"--{word[5:]}=false"
    named = [word.split("=")[0] for word in flags if word.startswith("--")]
    if twice := next((name for name in named if name in known and named.count(name) > 1), None):
        evidence = f"`{twice}` is given {named.count(twice)} times; the last one is used."
        report([Finding.warning("settings-contradict", evidence)])
    namespace, unknown = parser.parse_known_args(flags)
    names = [word.lstrip("-").split("=")[0] for word in unknown if word.startswith("--")]
    if unknown and (not names or "--" in unknown):
        raise TypeError(f"{unknown[0]!r} stands where a flag should; flags are written `--field value`.")
    values = {**vars(namespace), **dict.fromkeys(names)}
    for name in {"optim_target_modules", "report_to"} & values.keys():
        values[name] = values[name] if len(values[name]) > 1 else values[name][0]
    return values


def _read_script_flags(values: dict[str, Any]) -> None:
    """Replace flags of TRL's example scripts by keys of a run, with the scripts' defaults for adapters."""
    adapts = values.pop("use_peft", False) not in (False, [False])
    for key, names in SCRIPT_FLAGS.items():
        found: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        given = [name for name in names if name in values]
        for old, new in names.items():
            if isinstance(value := values.pop(old, None), list):  # of a flag, which may have no value or several
                value = [str(part).strip(",") for part in value] if len(value) > 1 else [*value, True][0]
            found |= {} if value is None or value is False else {new: value}
        if key == "peft" and adapts:
            defaults = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
        elif key == "peft" and found and not values.get("peft"):
            evidence = f"{', '.join(given)} of an adapter, but no `use_peft`: pass it too, or leave them out."
            raise CheckError.of("run-incomplete", evidence)
        if found or defaults:
            values[key] = {**defaults, **(_as_mapping(key, values.get(key)) or {}), **found}
    if (subset := values.pop("dataset_config", None)) and values.get("dataset"):
        values["dataset"] += f":{subset}"
    elif subset:
        report([Finding.warning("setting-unread", "`dataset_config` has no effect: the run has no dataset.")])
    if "reward_model_name_or_path" in values:
        own = _as_list(values.get("reward_funcs") or [])
        values["reward_funcs"] = [*own, values.pop("reward_model_name_or_path")]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _with_lists(peft: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an adapter, with lists where peft would read a name letter by letter, or as a pattern of paths."""
    found = dict(peft)
    for name in ("modules_to_save", "target_parameters", "target_modules"):
        value = found.get(name)
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else []
        if parts and (name != "target_modules" or all(part.isidentifier() for part in parts)):  # not `all-linear`
            found[name] = parts
    return found


def _settle_method(values: dict[str, Any], fixed: str | None) -> str:
    """Remove the method from `values`: `method`, or one of its names in ms-swift."""
    named = values.pop("method", None)
    if values.get("advantage_estimator") is not None and values.get("rlhf_type") == "grpo":
        del values["rlhf_type"]  # there, RLOO is GRPO with another estimator
    for other in ("advantage_estimator", "rlhf_type"):
        if other not in values:
            continue
        value = values.pop(other)
        if other == "advantage_estimator":
            check_estimator(value)
        warn(f"`{other}` is called `method` here.", FutureWarning)
        if named is not None and named != value:
            raise CheckError.of("settings-contradict", f"method={named!r} and {other}={value!r} contradict each other.")
        named = value
    config_of(named or fixed or "grpo")
    if fixed is not None and named is not None and named != fixed:
        evidence = f"the run says method={named!r}, but the command is `covey {fixed}`: use `covey {named}`."
        raise CheckError.of("settings-contradict", evidence)
    return fixed or named or "grpo"


def typed(values: Mapping[str, Any], config_class: type[OnlineConfig]) -> dict[str, Any]:
    """Convert values to the types of their fields: YAML reads 1e-6 as text and `eval_strategy: no` as False."""
    flags = {action.dest: action for action in flag_parser(config_class)._actions}
    result: dict[str, Any] = {}
    for name, value in values.items():
        alias = ALIASES.get(name, Alias(name))
        flag = flags.get(alias.new or "") if alias.convert is Alias.convert else None
        convert = flag.type if flag else None
        if name.endswith("_strategy") and value is False:
            value = "no"
        elif name == "reward_weights" and isinstance(value, str | list):
            value = _numbers(value)
        elif name in ("output_dir", "run_name", "hub_model_id") and not isinstance(value, str | None):
            evidence = f"{name}: {value} is read as a {type(value).__name__}: put it in quotes."
            raise CheckError.of("setting-type", evidence)
        elif isinstance(value, str) and callable(convert) and convert is not str:
            try:
                value = [convert(value)] if flag and flag.nargs == "+" else convert(value)
            except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
                raise CheckError.of("setting-format", f"{name}={value!r} cannot be read: {error}.") from error
        result[name] = value
    return result


def _as_mapping(name: str, value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        try:
            value = yaml_value(value)
        except ValueError as error:
            raise CheckError.of("setting-format", f"{name}={error}") from error
    if value is None or value is False:
        return None
    if value is not True and not isinstance(value, dict):
        examples = {
            "sources": "{sums: {dataset: sums.jsonl}}",
            "columns": "{question: prompt}",
            "quantization": "{load_in_4bit: true}",
        }
        example = examples.get(name, "{r: 16, lora_alpha: 32}")
        raise CheckError.of("setting-type", f"{name}={value!r} must be a mapping, such as {example}.")
    return {} if value is True else value
