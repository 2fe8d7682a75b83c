"""`covey study`: trains many configurations over one model, and stops, clones, changes and resumes them meanwhile."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from covey.cli.run_file import RUN_KEYS, FlagParser, read_mapping
from covey.config.aliases import ALIASES, hint
from covey.config.messages import closest
from covey.runtime.quiet import without_bars
from covey.runtime.user_code import warn
from covey_tools.study.commands import KINDS, Command, read_state, send

USAGE = """usage: covey study study.yaml [--resume] [--field value ...]
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
        options, flags = parser.parse_known_args(list(argv))
        text = train(read_mapping(options.file), options.resume, flags)
        show(text)
        return 0
    parser = FlagParser(prog=f"covey study {argv[0]}", usage=USAGE)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--study", required=True)
    parser.add_argument("--to")
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_intermixed_args(list(argv[1:]))
    if argv[0] == "show":
        if options.words or options.to or options.fresh:
            raise ValueError("`covey study show` shows all variants, and takes --study alone.")
        read_state(options.study)
        title, text, *history = Path(options.study, "study.md").read_text().split("\n\n", 2)
        print(title.removeprefix("# "))
        show(text)
        print("".join(f"\n{part}" for part in history), end="")
        return 0
    if not options.words:
        raise ValueError(f"`covey study {argv[0]}` needs the name of a variant. See `covey study -h`.")
    name, *changes = options.words
    print(send(options.study, Command(argv[0], name, changes_of(changes), options.to, options.fresh)))
    return 0


def show(text: str) -> None:
    """Print a study's table, on a terminal with lines."""
    if sys.stdout.isatty():
        import rich

        from covey_tools.study.report import rich_table

        rich.print(rich_table(text))
    else:
        print(text)


@without_bars()
def train(values: dict[str, Any], resume: bool = False, flags: Sequence[str] = ()) -> str:
    """Train the study of a file, with flags (`--field value`) that win over it; returns its table."""
    from covey.cli.config_file import config_of, new_name, parse_flags, typed
    from covey.cli.data import load_rows
    from covey.cli.train import parts_of, read_run, rewards
    from covey_tools.study.plan import KEYS, halving_of, refuse_unknown, variants_of
    from covey_tools.study.report import table
    from covey_tools.study.study import Study

    plan = values.pop("study", None)
    if not isinstance(plan, Mapping):
        given = "the file has no key `study`, which" if plan is None else f"study={plan!r}"
        raise ValueError(f"{given} must be a mapping with some of the keys {', '.join(KEYS)}.")
    refuse_unknown("study", plan, KEYS)
    flagged = parse_flags(flags)
    values = {name: value for name, value in values.items() if new_name(name) not in map(new_name, flagged)} | flagged
    run = read_run(values, [], None)
    if run.quantization:
        raise ValueError(
            f"quantization={values['quantization']!r} is not possible in a study: the model has 16 or 32 bits. Leave it"
            " out."
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
        eval_dataset=rows_to_compare(run),
        eval_steps=plan.get("eval_steps"),
        save_rounds=plan.get("save_rounds"),
        halving=halving_of(plan.get("halving")),
        parts=parts_of(run),
    )
    return table(study.train(resume))


def rows_to_compare(run: Any) -> Sequence[dict[str, Any]]:
    """The rows of all evaluation sets of a run file; the study asks them in its own way."""
    from covey.cli.data import evaluation_sets, load_evaluations
    from covey.trainer.evaluation.suites import rows_of

    loaded = load_evaluations(run.eval_dataset, run.columns)
    sets = list(loaded.values()) if isinstance(loaded, dict) else [] if loaded is None else [loaded]
    entries = [entry for entry in evaluation_sets(run.eval_dataset).values() if isinstance(entry, Mapping)]
    if ignored := sorted({name for entry in entries for name in entry} - {"dataset", "split"}):
        warn(
            f"a study compares its variants by their mean rewards, sampled as in training: {', '.join(ignored)} of"
            " eval_dataset have no effect. Evaluate a variant with them by `covey eval --model DIR/NAME`.",
        )
    return [dict(row) for one in sets for row in rows_of(one)]


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
