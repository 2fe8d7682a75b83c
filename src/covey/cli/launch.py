"""`--accelerate_config`: a training command that starts its own processes, through `accelerate launch`.

What is launched is the same command without these flags, once for each process. Not here: what a config says
(`examples/accelerate_configs`), and training.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

FLAGS = (
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
)
"""Flags that say, together with a config, which processes are started where; `accelerate launch` knows them by these
names."""


def launch_if_asked(method: str, argv: Sequence[str]) -> list[str]:
    """The arguments of the run itself. With `--accelerate_config` this process becomes the launcher and never returns.

    Args:
        method: "grpo" or "rloo", the command.
        argv: its arguments.

    Raises:
        ValueError: there is no such config, or the process was launched already.
    """
    command = launch_command(method, argv)
    if command is None:
        return list(argv)
    if "LOCAL_RANK" in os.environ:
        raise ValueError(
            "--accelerate_config starts the processes of a run, but this process is one of several already: torchrun or"
            " `accelerate launch` has started it. Use one of the two."
        )
    sys.stdout.flush()
    os.execv(command[0], command)


def launch_command(method: str, argv: Sequence[str]) -> list[str] | None:
    """What `--accelerate_config` amounts to, or None where it is not given.

    Example:
        >>> launch_command("grpo", ["run.yaml", "--accelerate_config", "my.yaml", "--num_processes", "2"])
        ['/usr/bin/python3', '-m', 'accelerate.commands.launch', '--config_file', 'my.yaml', '--num_processes', '2',
         '--module', 'covey.cli.main', 'grpo', 'run.yaml']

    Raises:
        ValueError: there is no such config, or a flag lacks its value.
    """
    config, rest = _take("accelerate_config", argv)
    if config is None:
        return None
    options: list[str] = []
    for name in FLAGS:
        value, rest = _take(name, rest)
        if value is not None:
            options += [f"--{name}", value]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(find_config(config)), *options]
    return [*launcher, "--module", "covey.cli.main", method, *rest]


def find_config(name: str) -> Path:
    """The file of an accelerate config: one that comes with Covey, by its name, or any other by its path.

    Raises:
        ValueError: there is none.
    """
    if Path(name).is_file():
        return Path(name)
    known = {path.stem: path for path in configs_folder().glob("*.yaml")}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"--accelerate_config {name!r} is neither a file nor a config that comes with Covey; those are"
        f" {', '.join(sorted(known))}.{hint}"
    )


def configs_folder() -> Path:
    """Where the configs that come with Covey lie: in the package, or beside the sources it runs from."""
    package = Path(__file__).parents[1]
    installed = package / "accelerate_configs"
    return installed if installed.is_dir() else package.parents[1] / "examples" / "accelerate_configs"


def _take(name: str, argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of a flag, written `--name value` or `--name=value`, and the arguments without it."""
    words = list(argv)
    for index, word in enumerate(words):
        if word.startswith(f"--{name}="):
            return word.partition("=")[2], words[:index] + words[index + 1 :]
        if word == f"--{name}":
            if index + 1 == len(words) or words[index + 1].startswith("--"):
                raise ValueError(f"--{name} needs a value after it.")
            return words[index + 1], words[:index] + words[index + 2 :]
    return None, words
