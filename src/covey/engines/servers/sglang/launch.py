"""Start of an SGLang server (`python -m` this, with its flags) with a key from the environment.

SGLang reads its key only from the command line, which every user of the machine can see. Here it is added inside the
process.
"""

import importlib.util
import logging
import os
import re
import runpy
import sys
from collections.abc import Mapping
from typing import Any

KEY = "SGLANG_API_KEY"  # environment variable with the key; the trainer reads it too
LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"  # if set, a server's log-probs leave out the temperature
MODULE = "covey.engines.servers.sglang.launch"


def command(
    model: str, port: int, device: str, flags: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Command of a server that only this machine can reach, and the variables to add to its environment.

    `device` "cuda:1" is the second of the GPUs that this process sees. `flags` are SGLang's, with underscores or
    dashes; True stands for a flag without a value. ValueError for a device that does not exist.
    """
    kind, _, index = device.partition(":")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"sglang_device={device!r} is not a device to start a server on: write cuda:1, or cpu.")
    words = [sys.executable, "-m", MODULE, "--model-path", model, "--host", "127.0.0.1", "--port", str(port)]
    added = {}
    if kind == "cpu":
        words += ["--device", "cpu"]
    else:
        seen = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        number = int(index or 0)
        if seen and number >= len(seen):
            raise ValueError(f"sglang_device={device!r}: this process sees {len(seen)} GPUs (CUDA_VISIBLE_DEVICES).")
        added["CUDA_VISIBLE_DEVICES"] = seen[number] if seen else str(number)
    for name, value in flags.items():
        if value is not False and value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words, added


def hide_in_logs(key: str) -> None:
    """Remove the key from log messages of this process: SGLang logs its arguments, into the run's folder."""
    make = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        made.msg = made.msg.replace(key, "...") if isinstance(made.msg, str) else made.msg
        return made

    logging.setLogRecordFactory(record)


if __name__ == "__main__":
    if not importlib.util.find_spec("sglang"):
        sys.exit("SGLang is not installed here: pip install sglang.")
    key = os.environ.pop(KEY, None)
    if key:
        hide_in_logs(key)
        sys.argv += ["--api-key", key]
    os.environ.pop(LOGPROBS, None)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
