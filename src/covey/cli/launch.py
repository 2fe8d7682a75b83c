"""`--accelerate_config`: a training command that starts its own processes, through `accelerate launch`."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil  # which accelerate requires

from covey.cli.run_file import LAUNCH_FLAGS, FlagParser
from covey.config.hardware import require_deepspeed
from covey.config.messages import closest
from covey.runtime.files import read_text, shipped


def launch_if_asked(method: str, argv: Sequence[str]) -> list[str]:
    """The arguments of the run itself; with `--accelerate_config` this process becomes the launcher instead."""
    command = launch_command(method, argv)
    if command is None:
        return list(argv)
    if "LOCAL_RANK" in os.environ:
        raise ValueError(
            "--accelerate_config starts the processes of a run, but this process is one of several already: torchrun or"
            " `accelerate launch` has started it. Use one of the two."
        )
    config = Path(command[command.index("--config_file") + 1])
    if "DEEPSPEED" in read_text(config).upper():
        require_deepspeed(f"the accelerate config {config.stem!r}")
    sys.stdout.flush()
    os.execv(command[0], command)


def launch_command(method: str, argv: Sequence[str]) -> list[str] | None:
    """The launcher's command, which runs this one without these flags; None without `--accelerate_config`."""
    parser = FlagParser(add_help=False, allow_abbrev=False)
    for name in ("accelerate_config", *LAUNCH_FLAGS):
        parser.add_argument(f"--{name}")
    found, rest = parser.parse_known_args(argv)
    if found.accelerate_config is None:
        return None
    command = [sys.executable, "-m", "covey.cli.launch", "--config_file", str(find_config(found.accelerate_config))]
    for name in LAUNCH_FLAGS:
        if getattr(found, name) is not None:
            command += [f"--{name}", getattr(found, name)]
    return [*command, "--module", "covey.cli.main", method, *rest]


def find_config(name: str) -> Path:
    """The file of an accelerate config: the path, or the name of one that comes with Covey."""
    if Path(name).is_file():
        return Path(name)
    known = {path.stem: path for path in shipped("examples/accelerate_configs").glob("*.yaml")}
    if name in known:
        return known[name]
    raise ValueError(
        f"--accelerate_config {name!r} is neither a file nor a config that comes with Covey; those are"
        f" {', '.join(sorted(known))}.{closest(name, known)}"
    )


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Ask the training process to end; accelerate alone would leave it running."""
    children = psutil.Process().children()
    for child in children:
        child.send_signal(number)
    if not children:
        sys.exit(128 + number)


def main() -> int:
    """`accelerate launch` with these arguments, without its tracebacks: the processes have said what happened."""
    from accelerate.commands.launch import main as launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, _pass_on)  # torch's launcher of several processes sets its own
    try:
        launch()
    except subprocess.CalledProcessError as error:  # of a config for a single process
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            cause = ", as where memory runs out" * (name == "SIGKILL")
            print(f"covey: error: process {rank} was ended by {name}{cause}, and the others with it", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
