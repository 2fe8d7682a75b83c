"""Checks of a command before torch and transformers are imported, which takes seconds: help, names and paths.

What passes here is checked again, completely, where it is used.
"""

import ast
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from covey.cli import run_help
from covey.cli.explain.flags import flag_parser as explain_flags
from covey.cli.parsers import PARSERS
from covey.cli.run_file import (
    FOREIGN_NAMES,
    LAUNCH_FLAGS,
    OTHER_NAMES,
    check_data_file,
    evaluation_sets,
    is_function,
    is_local,
    read_mapping,
    refuse_unknown,
    take_config,
)
from covey.config.declared import METHODS, field_names
from covey.config.messages import closest
from covey.observability.record_files import read_run
from covey.runtime.hub import look_up
from covey.runtime.import_path import check_file

SOURCES = ("give a file of JSON lines", "give the output_dir of a run")
HELP = ("-h", "--help")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
METHOD_OF = {"grpo": "grpo", "rloo": "rloo", "eval": None, "explain": None, "study": None}
"""Commands that read a run file, and the method that they fix."""


def answer(name: str, argv: Sequence[str]) -> int | None:
    """Exit status of a command whose help was asked for, or None: it is to run.

    Raises:
        ValueError, OSError: a setting that is unknown, or a file or folder that is not there.
    """
    asks = not {*HELP}.isdisjoint(argv)
    if name in METHODS and (asks or not argv):
        print(run_help.help_text(name, everything="--help" in argv) if asks else run_help.usage(name))
        return 0 if asks else 2
    if name == "eval" and (asks or not argv):
        print(run_help.EVALUATE)
        return 0 if asks else 2
    if name == "explain" and (asks or not argv):
        print(explain_flags().format_help())
        return 0 if asks else 2
    if name in PARSERS:
        given, flags = PARSERS[name]().parse_known_args(list(argv))
        check_folders(name, given)
        if name == "doctor" and not Path(given.run).is_dir():
            check_run(given.run, None, flags)
    elif name in METHOD_OF and argv and not asks and "LOCAL_RANK" not in os.environ:
        path, flags = take_config(list(argv))
        if name == "explain":  # which reports everything that is not there
            check_names(path, None, flags, [word.removeprefix("--") for word in explain_flags()._option_string_actions])
        elif name != "study":
            check_run(path, METHOD_OF[name], flags)
        elif path is not None and Path(path).suffix:
            check_run(path, None)
    return None


def check_folders(name: str, given: Any) -> None:
    if name in ("diff", "replay"):
        for run in given.runs if name == "diff" else [given.run]:
            read_run(run)
    if name == "doctor" and not Path(given.run).exists():
        raise FileNotFoundError(f"there is no run file or folder {given.run!r}.")
    if name == "rewards":
        check_reference(given.function, "reward")
        for path in (given.completions, given.run):
            if path is not None and not path.exists():
                raise FileNotFoundError(f"there is no {str(path)!r}: {SOURCES[path is given.run]}.")


def check_run(path: str | None, method: str | None, flags: Sequence[str] = ()) -> None:
    """Check names and paths of a run file and its flags."""
    check_parts(check_names(path, method, flags))


def check_names(
    path: str | None, method: str | None, flags: Sequence[str], further: Sequence[str] = ()
) -> dict[str, Any]:
    """Values of a run file and its flags, of which the command has `further` ones of its own."""
    values = read_mapping(path) if path is not None else {}
    values = {**values, **dict(pairs(flags))}
    method = method or str(values.get("method") or "grpo")
    further = (*further, *FOREIGN_NAMES, "accelerate_config", *LAUNCH_FLAGS, "study")
    with suppress(OSError):  # a program without source files: its config checks the names
        fields = field_names(method if method in METHODS else "grpo")
        negated = [f"no_{name}" for name in fields]
        try:
            refuse_unknown([name for name in values if name not in (*further, *negated)], method, fields)
        except TypeError as error:
            raise ValueError(str(error)) from error
    return values


def pairs(flags: Sequence[str]) -> Iterable[tuple[str, Any]]:
    """Names of flags and the words after them: one word, several, or None."""
    places = [place for place, word in enumerate(flags) if word.startswith("--")]
    for place, following in pairwise([*places, len(flags)]):
        name, equals, value = flags[place][2:].partition("=")
        words = [value] if equals else list(flags[place + 1 : following])
        name = name.replace("-", "_")
        yield name, (words[0] if len(words) == 1 else words or None)


def check_parts(values: Mapping[str, Any]) -> None:
    """Check that files, folders, models and data sets that a run names are there."""
    run = {OTHER_NAMES.get(name, name): value for name, value in values.items()}
    for reference in _listed(run.get("reward_funcs")):
        check_reference(reference, "reward")
        if "/" in reference.partition("(")[0] and ".py" not in reference:
            look_up(reference, called=f"reward model {reference!r}")
    for name in ("tools", "rollout_func"):
        for reference in _listed(run.get(name)):
            check_reference(reference, name.removesuffix("s"))
    factory = run.get("environment_factory")
    for reference in _listed(list(factory.values()) if isinstance(factory, dict) else factory):
        check_reference(reference, "environment_factory")
    for entry in (run.get("dataset"), *evaluation_sets(run.get("eval_dataset")).values()):
        spec = entry.get("dataset") if isinstance(entry, dict) else entry
        if not isinstance(spec, str):
            continue
        if is_function(spec):
            check_reference(spec, "dataset")
        elif is_local(spec):
            check_data_file(Path(spec).expanduser())
        else:
            look_up(spec.partition(":")[0], "dataset")
    if isinstance(model := run.get("model"), str):
        settings = run.get("model_init_kwargs")
        kept = settings if isinstance(settings, dict) else {}
        location = {key: kept[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in kept}
        if not look_up(model, **location):
            os.environ["HF_HUB_OFFLINE"] = "1"  # else each request of the libraries is repeated for half a minute
            print(f"covey: the hub cannot be reached: taking {model} as it was downloaded before", file=sys.stderr)


def _listed(value: Any) -> list[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def check_reference(reference: str, kind: str) -> None:
    """Check that the Python file of `path/to/file.py:name` is there, and that the name stands in it."""
    source, colon, name = reference.partition("(")[0].strip().rpartition(":")
    if not (colon and source.endswith(".py")):
        return
    try:
        tree = ast.parse(check_file(source, kind).read_bytes())
    except SyntaxError:
        return  # running it says what is wrong
    names = names_in(tree)
    if names is not None and name not in names:
        functions = [one.name for one in tree.body if isinstance(one, DEFINITIONS)]
        functions += [
            one.asname or one.name for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names
        ]
        there = ", ".join([one for one in sorted(functions) if not one.startswith("_")][:30]) or "no functions"
        raise ValueError(f"{kind} {reference!r}: {name!r} does not exist. There: {there}.{closest(name, names)}")


def names_in(tree: ast.Module) -> set[str] | None:
    """Names that a module may define at its top level; None where that shows only when it runs."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id="globals" | "exec" | "setattr" | "vars"):
                return None
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                return None
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                names.update((one.asname or one.name).partition(".")[0] for one in imported)
    return names
