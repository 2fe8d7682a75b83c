"""`covey init`: the data, the rewards and the run file that docs/start.md shows, as a folder that trains at once."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from covey.runtime.files import shipped

FILES = ("tickets.csv", "rewards.py", "run.yaml")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="covey init", description=f"Write {', '.join(FILES)} into a folder: a run that works, to be changed."
    )
    parser.add_argument("folder", nargs="?", default=".", help="made if it is missing; this folder if not given")
    folder = Path(parser.parse_args(list(argv)).folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file. Name a folder.")
    if there := [name for name in FILES if (folder / name).exists()]:
        raise ValueError(f"{str(folder)!r} holds {', '.join(there)} already: nothing is written over. Name another.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents().items():
        (folder / name).write_text(content)
        print(folder / name)
    enter = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"\nNext:\n  {enter}covey explain run.yaml    # what will this run do?\n  covey grpo --config run.yaml")
    return 0


def contents() -> dict[str, str]:
    page = shipped("docs/start.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    return {name: shown[name] for name in FILES}
