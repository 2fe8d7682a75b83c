"""Count the files and functions of Covey that the second step of a default run enters.

    .venv/bin/python tools/step_size.py [PREFIX]    # with PREFIX, name the functions of files that begin with it

One process, the built-in engine, a reward function, a tiny model. Python 3.11 counts comprehensions as functions; later
versions count fewer.
"""

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.support import runs  # noqa: E402

SETTINGS = {"gradient_accumulation_steps": 1, "gradient_checkpointing": True, "max_steps": 3}


def main(prefix: str | None = None) -> None:
    source, entered = f"{ROOT / 'src' / 'covey'}/", set()
    parts = {"train_dataset": [{"prompt": f"p{i}"} for i in range(8)], "reward_funcs": runs.digits}

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(source):
            entered.add((code.co_filename.removeprefix(source), code.co_firstlineno, code.co_name))

    with tempfile.TemporaryDirectory() as folder:
        trainer = runs.trainer(folder, parts=parts, **SETTINGS)
        step = trainer.training_step

        def traced(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step != 1:  # the first step has checks of its own
                return step(*args, **kwargs)
            sys.setprofile(note)
            threading.setprofile(note)
            try:
                return step(*args, **kwargs)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]

        trainer.training_step = traced
        trainer.train()
    for file, line, name in sorted(entered):
        if prefix is not None and file.startswith(prefix):
            print(f"{file}:{line} {name}")
    print(f"{len({file for file, _, _ in entered})} files, {len(entered)} functions")


if __name__ == "__main__":
    main(*sys.argv[1:])
