"""`covey study`: trains many configurations over one model, and stops, clones, changes and resumes them meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from covey.cli.run_file import RUN_KEYS, FlagParser, read_mapping
from covey.config.aliases import ALIASES, hint
from covey.config.messages import closest
from covey.study.commands import KINDS, Command, read_state, send

USAGE = """usage: covey study study.yaml [--resume]
       covey study stop NAME --study DIR
       covey study resume NAME [field=value ...] --study DIR
       covey study change NAME field=value ... --study DIR
       covey study clone NAME --to NEW [--fresh] [field=value ...] --study DIR
       covey study show --study DIR

The file is that of `covey grpo` with a key `study`: variants (name: settings), grid (field: values), random (count,
seed, field: values or {min, max, log}), eval_steps (a number or a list of steps), save_rounds, halving (the share to
keep, or {keep, certain}). Variants with `peft: null` train the whole model, one after another. DIR is output_dir."""
VARIANT_KEYS = ("peft", "method", "reward_funcs", "system_prompt")  # what variants change in addition to the config


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if argv[0] not in (*KINDS, "show"):
        if not Path(argv[0]).suffix and not Path(argv[0]).exists():
            hint = closest(argv[0], (*KINDS, "show"))
            raise ValueError(f"{argv[0]!r} is neither a file nor one of {', '.join((*KINDS, 'show'))}.{hint}")
        parser = FlagParser(prog="covey study", usage=USAGE)
        parser.add_argument("file")
        parser.add_argument("--resume", action="store_true")
        options = parser.parse_args(list(argv))
        print(train(read_mapping(options.file), options.resume))
        return 0
    parser = FlagParser(prog=f"covey study {argv[0]}", usage=USAGE)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--study", required=True)
    parser.add_argument("--to")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_intermixed_args(list(argv[1:]))
    if argv[0] == "show":
        read_state(options.study)
        print(Path(options.study, "study.md").read_text())
        return 0
    if not options.words:
        raise ValueError(f"`covey study {argv[0]}` needs the name of a variant. See `covey study -h`.")
    name, *changes = options.words
    print(send(options.study, Command(argv[0], name, changes_of(changes), options.to, options.fresh)))
    return 0


def train(values: dict[str, Any], resume: bool = False) -> str:
    """Train the study of a file; returns its table."""
    from covey.cli.config_file import config_of, typed
    from covey.cli.data import load_rows
    from covey.cli.train import parts_of, read_run, rewards
    from covey.study.plan import KEYS, halving_of, refuse_unknown, variants_of
    from covey.study.report import table
    from covey.study.study import Study

    plan = values.pop("study", None)
    if not isinstance(plan, Mapping):
        given = "the file has no key `study`, which" if plan is None else f"study={plan!r}"
        raise ValueError(f"{given} must be a mapping with some of the keys {', '.join(KEYS)}.")
    refuse_unknown("study", plan, KEYS)
    run = read_run(values, [], None)
    if run.quantization or isinstance(run.eval_dataset, Mapping):
        name = "quantization" if run.quantization else "eval_dataset"
        raise ValueError(
            f"{name}={values[name]!r} is not possible in a study: the model has 16 or 32 bits, and variants"
            " are compared on one data set, given by name. Leave it out, or name one."
        )
    settings = {name: value for name, value in values.items() if name not in RUN_KEYS}
    own = {"method": run.method, "peft": run.peft, "system_prompt": run.system_prompt}
    changes = variants_of(plan).items()
    study = Study(
        run.model,
        {name: typed(one, config_of(one.get("method", run.method))) for name, one in changes},
        {**typed(settings, config_of(run.method)), **own},
        reward_funcs=rewards(run.reward_funcs) or None,
        train_dataset=load_rows(run.dataset, run.dataset_split, run.columns) if run.dataset else None,
        eval_dataset=load_rows(run.eval_dataset, None, run.columns) if run.eval_dataset else (),
        eval_steps=plan.get("eval_steps"),
        save_rounds=plan.get("save_rounds"),
        halving=halving_of(plan.get("halving")),
        parts=parts_of(run),
    )
    return table(study.train(resume))


def changes_of(words: Sequence[str]) -> dict[str, Any]:
    """Settings written as field=value."""
    from covey.cli.config_file import config_of, typed

    changes = {}
    for word in words:
        field, equals, value = word.partition("=")
        if field in changes:
            raise ValueError(f"{field} is given twice: leave one out.")
        if not equals:
            raise ValueError(f"{word!r} is no setting; write field=value, as in learning_rate=1e-5.")
        try:
            changes[field] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{word!r} cannot be read: {error}") from error
    config = config_of("rloo")  # the class with the most fields
    known = [*(one.name for one in fields(config)), *ALIASES, *VARIANT_KEYS]
    if unknown := [name for name in changes if name not in known]:
        raise ValueError(f"`{unknown[0]}` is no setting of a variant{hint(unknown[0], known)}")
    return typed(changes, config)
