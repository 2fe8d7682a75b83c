"""Print figures of the code: lines by package, lengths of functions, and what one step of a default run enters.

    .venv/bin/python tools/shape.py            # src/covey, src/covey_tools where it exists, and tests
    .venv/bin/python tools/shape.py --step     # also what the second step of a tiny run enters
    .venv/bin/python tools/shape.py --step --names trainer/    # with the functions of files that begin with this

They describe the code to whoever wants to look; no test asserts one of them, and no code is to be bent to them. A step
is one process, the built-in engine, a reward function and a tiny model. Python 3.11 counts comprehensions as functions;
later versions count fewer.
"""

import argparse
import ast
import io
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "covey"
SETTINGS = {"gradient_accumulation_steps": 1, "gradient_checkpointing": True, "max_steps": 3}
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LONGEST = 5  # functions that are named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true", help="train a tiny model for three steps and look at the second")
    parser.add_argument("--names", metavar="PREFIX", help="with --step: name the functions of these files")
    options = parser.parse_args()
    for folder in (SOURCE, ROOT / "src" / "covey_tools", ROOT / "tests"):
        if folder.exists():
            print_lines(folder)
            print_functions(folder)
    if options.step:
        print_step(options.names)


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


# ---- lines -----------------------------------------------------------------------------------------------------------


def print_lines(folder: Path) -> None:
    """A row for each package: files, lines, and of these code, docstrings, comments and blank ones."""
    kinds = ("code", "docstring", "comment", "blank")
    total: Counter[str] = Counter()
    print(f"\n{folder.relative_to(ROOT)}\n{'package':16}{'files':>7}{'lines':>8}" + "".join(f"{k:>11}" for k in kinds))
    for package in sorted({path.relative_to(folder).parts[0] for path in python_files(folder)}):
        counts: Counter[str] = Counter()
        inside = folder / package
        for path in python_files(inside) if inside.is_dir() else [inside]:
            counts += count_lines(path.read_text()) + Counter(files=1)
        total += counts
        print(f"{package:16}{_row(counts, kinds)}")
    print(f"{'all':16}{_row(total, kinds)}")


def _row(counts: Counter[str], kinds: tuple[str, ...]) -> str:
    lines = sum(counts[kind] for kind in kinds)
    return f"{counts['files']:7}{lines:8}" + "".join(f"{counts[kind]:11}" for kind in kinds)


def count_lines(text: str) -> Counter[str]:
    """Lines by kind; a line with code and a comment is code.

    Example:
        >>> dict(count_lines('\"\"\"Doc.\"\"\"\\n\\nx = 1  # one\\n# two\\n'))
        {'docstring': 1, 'blank': 1, 'code': 1, 'comment': 1}
    """
    kind = dict.fromkeys(range(1, len(text.splitlines()) + 1), "blank")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            kind.update(dict.fromkeys(range(token.start[0], token.end[0] + 1), "code"))
        elif token.type == tokenize.COMMENT and kind[token.start[0]] == "blank":
            kind[token.start[0]] = "comment"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                kind.update(dict.fromkeys(range(first.lineno, (first.end_lineno or 0) + 1), "docstring"))
    return Counter(kind.values())


# ---- functions -------------------------------------------------------------------------------------------------------


def print_functions(folder: Path) -> None:
    """Lengths of functions without their docstrings, and the longest by name."""
    lengths = sorted(length_of_functions(folder))
    sizes = [length for length, _ in lengths]
    middle, high = sizes[len(sizes) // 2], sizes[len(sizes) * 9 // 10]
    print(f"{len(sizes)} functions: median {middle} lines, 90th percentile {high}, longest {sizes[-1]}")
    for length, name in reversed(lengths[-LONGEST:]):
        print(f"    {length} {name}")


def length_of_functions(folder: Path) -> Iterator[tuple[int, str]]:
    for path in python_files(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                yield length, f"{path.relative_to(folder)}:{node.lineno} {node.name}"


# ---- a step ----------------------------------------------------------------------------------------------------------


def print_step(prefix: str | None) -> None:
    entered, records = trace_step()
    for file, line, name in sorted(entered):
        if prefix is not None and file.startswith(prefix):
            print(f"    {file}:{line} {name}")
    print(
        f"\nA step enters {len(entered)} functions in {len({file for file, _, _ in entered})} files of {SOURCE.name}."
    )
    print(f"It makes objects of {len(records)} classes (NamedTuples not counted): {', '.join(sorted(records))}.")


def trace_step() -> tuple[set[tuple[str, int, str]], set[str]]:
    """Functions that the second step enters, as (file, line, name), and classes whose objects it makes."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    from tests.support import runs
    from transformers import TrainerCallback

    source, entered, records = f"{SOURCE}/", set(), set()
    parts = {"train_dataset": [{"prompt": f"p{i}"} for i in range(8)], "reward_funcs": runs.digits}

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(source):
            entered.add((code.co_filename.removeprefix(source), code.co_firstlineno, code.co_name))
        if event == "call" and code.co_name in ("__init__", "__new__") and code.co_argcount:
            made = frame.f_locals[code.co_varnames[0]]
            kind = made if isinstance(made, type) else type(made)
            if kind.__module__.startswith("covey."):
                records.add(kind.__name__)

    class TraceSecondStep(TrainerCallback):  # the first one has checks of its own
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.set_profile(note if state.global_step == 1 else None)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.set_profile(None)

        def set_profile(self, profile: Any) -> None:
            sys.setprofile(profile)
            threading.setprofile(profile)

    with tempfile.TemporaryDirectory() as folder:
        trainer = runs.trainer(folder, parts=parts, **SETTINGS)
        trainer.add_callback(TraceSecondStep())
        trainer.train()
    return entered, records


if __name__ == "__main__":
    main()
