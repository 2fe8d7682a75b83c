"""The `covey` command: runs a subcommand, and shows errors that users can correct as one clear line."""

import io
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module

from covey import __version__
from covey.runtime.interrupts import ANSWERED, Interrupts
from covey.runtime.safe_text import printable

COMMANDS = {
    "init": ("covey_tools.init", "main", "write data, rewards and a run file to begin with"),
    "grpo": ("covey.cli.train", "grpo", "train with GRPO and the losses descended from it"),
    "rloo": ("covey.cli.train", "rloo", "train with REINFORCE and a leave-one-out baseline"),
    "eval": ("covey.cli.train", "evaluate", "sample and score the evaluation sets of a run file, without training"),
    "study": ("covey_tools.study.command", "main", "train many configurations over one model, side by side"),
    "explain": ("covey.cli.explain.command", "main", "explain what a run will do, before doing any of it"),
    "view": ("covey_tools.view.command", "main", "look at runs on a page: curves, groups, completions, every token"),
    "doctor": ("covey_tools.doctor.command", "main", "find out why a run does not learn, and prove it"),
    "replay": ("covey_tools.replay", "main", "train again from the record of a run, without sampling"),
    "diff": ("covey_tools.diff", "main", "find the first difference between two runs, and what explains it"),
    "rewards": ("covey.cli.rewards", "main", "test a reward function on completions"),
    "sglang-serve": ("covey.cli.sglang_serve", "main", "start an SGLang server to sample from while training"),
    "vllm-serve": ("covey.cli.vllm_serve", "main", "start a vLLM server to sample from while training"),
    "tinker-serve": ("covey.cli.tinker_serve", "main", "serve programs written for the tinker client"),
    "demo": ("covey.cli.demo", "main", "teach a small model a task, on this machine, in minutes"),
    "env": ("covey.cli.env", "main", "print versions and hardware, as a bug report needs them"),
}
"""Name: module, function and purpose."""

EXAMPLES = (
    ("covey demo", "see it work"),
    ("covey init tickets", "begin with a run that works"),
    ("covey explain run.yaml", "what would this run do?"),
    ("covey grpo --config run.yaml", "do it"),
    ("covey grpo --config run.yaml --beta 0.04 --output_dir runs/with_kl", "with other settings"),
    ("covey eval --config run.yaml --model runs/first", "how good is that model?"),
    ("covey grpo -h", "every setting"),
)

USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)
"""Errors shown as one line with advice, as are those of servers. Any other is a bug and shows its traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: 0 for success, 2 for an error that the user can correct, 130 after an interruption."""
    arguments, debug = _take_debug(list(sys.argv[1:] if argv is None else argv))
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"covey {__version__}")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode ends no run
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where: print(
                f"covey: warning: {printable(str(message))}", file=sys.stderr
            )
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks for it
            with Interrupts().listening():
                status = _run(arguments[0], arguments[1:])
            if sys.stdout is not None:  # closed, as by >&-
                sys.stdout.flush()
            return status
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        if not hasattr(error, ANSWERED):
            print("covey: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        origin = type(error).__module__
        of_another = origin == "covey.trainer.distributed.collectives"  # a process that shows its error itself
        if not (isinstance(error, USER_ERRORS) or of_another or origin.startswith("covey.engines.servers.")):
            raise
        if debug:
            traceback.print_exc()
        text = str(error).strip().partition("\n")[0] if of_another else str(error).strip()
        print(f"covey: error: {printable(text) or type(error).__name__}", file=sys.stderr)
        return 2


def usage() -> str:
    width = max(len(example) for example, _ in EXAMPLES)
    longest = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{longest}}  {purpose}" for name, (_, _, purpose) in COMMANDS.items())
    examples = "\n".join(f"  {example:<{width}}  # {note}" for example, note in EXAMPLES)
    return (
        "usage: covey [--debug] COMMAND ...\n\n"
        "Group-relative reinforcement learning for language models.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n"
        "  -h, --help     this text; `covey COMMAND -h` tells more\n"
        "  -V, --version  print the version\n"
        "  --debug        show the traceback of an error\n\n"
        f"examples:\n{examples}"
    )


def _run(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        from covey.config.messages import closest

        raise ValueError(f"there is no command {name!r}; there are: {', '.join(COMMANDS)}.{closest(name, COMMANDS)}")
    from covey.cli.early import answer

    if (status := answer(name, arguments)) is not None:
        return status
    module, function, _ = COMMANDS[name]
    launched = "LOCAL_RANK" in os.environ
    if name in ("grpo", "rloo", "eval") and arguments and not (launched or {"-h", "--help"} & set(arguments)):
        file = next((word for word in arguments if word.endswith((".yaml", ".yml", ".json"))), "the flags")
        with suppress(BrokenPipeError):  # nobody reads it: the run continues
            print(f"covey {__version__}: {name} by {file}", flush=True)  # libraries take seconds to load
    with nullcontext() if launched else _command(shlex.join(["covey", name, *arguments])):
        return getattr(import_module(module), function)(arguments)


@contextmanager
def _command(words: str) -> Iterator[None]:
    """Name the command for the trainers of this process and of a launcher's, until it ends."""
    before = os.environ.get("COVEY_COMMAND")
    os.environ["COVEY_COMMAND"] = words
    try:
        yield
    finally:
        del os.environ["COVEY_COMMAND"]
        if before is not None:
            os.environ["COVEY_COMMAND"] = before


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Take `--debug` out where it stands alone; with a value after it, it is a setting of transformers."""
    alone = [
        index
        for index, word in enumerate(arguments)
        if word == "--debug" and (index == 0 or index + 1 == len(arguments) or arguments[index + 1].startswith("-"))
    ]
    return [word for index, word in enumerate(arguments) if index not in alone], bool(alone)


if __name__ == "__main__":
    sys.exit(main())
