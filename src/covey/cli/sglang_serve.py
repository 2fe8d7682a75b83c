"""`covey sglang-serve`: SGLang's own server, started with what training needs, safe by default.

It adds flags and then becomes the server (exec): signals, `kill` and exit status are SGLang's. See also:
`covey.engines.servers`, for the routes that training uses.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence

from covey.cli import serving
from covey.cli.serving import Backend, Request
from covey.engines.servers.sglang.launch import KEY, LOGPROBS, MODULE

OLDEST = (0, 5, 23)
"""First release that Covey's requests work with."""

SGLANG = Backend("sglang-serve", KEY, 30000)

LORA_DEFAULTS = {"max-lora-rank": "64", "lora-target-modules": "all"}
"""Required by a server that starts without an adapter, about adapters to come."""

HELP = """\
usage: covey sglang-serve --model M [--flag value ...]

Start SGLang's server with what training needs: token ids in and out with log-probs of what is sampled from, weight
updates, pause and continue, cache flushes. It listens on 127.0.0.1 by default.

  --model M        hub id or folder; may also stand first, without --model
  --host H         address to listen on (127.0.0.1); another one, 0.0.0.0 say, needs a key
  --port N         (30000)
  --api-key KEY    what every request must carry; better in the environment variable SGLANG_API_KEY, which other users
                   of the machine cannot see
  --config FILE    YAML mapping of these flags and the server's; flags on the command line override it
  --dry-run        print the command and its environment, and do nothing
  -h, --help       this text

Every other flag goes to SGLang as it is, in either spelling (--mem-fraction-static, --mem_fraction_static). Often used:
  --tp-size N   --mem-fraction-static F   --context-length N   --dtype D   --enable-lora --max-lora-rank R
  --enable-memory-saver               memory can be released while the policy is trained
  --enable-deterministic-inference    the same seeds give the same completions
`python -m sglang.launch_server --help` lists them all.

What is added, unless you give the flag yourself:
  --max-lora-rank 64 --lora-target-modules all   with --enable-lora: adapters come while it runs

examples:
  covey sglang-serve --model Qwen/Qwen2.5-7B-Instruct --tp-size 2
  SGLANG_API_KEY=$(openssl rand -hex 16) covey sglang-serve --model models/mine --host 0.0.0.0 --enable-lora
"""


def main(argv: Sequence[str]) -> int:
    """Become an SGLang server; returns only for `--help` and `--dry-run`.

    Raises:
        ValueError: arguments that cannot work, or a port that is taken.
        ImportError: SGLang is missing or too old.
    """
    if not argv or "-h" in argv or "--help" in argv:
        print(HELP)
        return 0 if argv else 2
    request = parse(argv, os.environ)
    check_release()
    return serving.become(request, *plan(request, os.environ), SGLANG)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Arguments of this command and of SGLang; see `serving.parse`.

    Raises:
        ValueError: also for a second key, of its routes for training: the trainer sends one.
    """
    request = serving.parse(argv, environ, SGLANG)
    if request.has("admin-api-key"):
        raise ValueError(
            f"--admin-api-key sets a second key for routes that training needs, but the trainer sends one: set {KEY}"
            " alone."
        )
    return request


def check_release() -> None:
    """Check that SGLang is installed and recent enough.

    Raises:
        ImportError: it is not.
    """
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"covey sglang-serve needs SGLang, which {sys.executable} does not have: pip install 'covey[sglang]', best"
            " in an environment of its own, on a machine with a GPU."
        ) from None
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(
            f"SGLang {found} is too old: weights are sent as {wanted} takes them. pip install -U 'sglang>={wanted}'."
        )


def plan(request: Request, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Command, additions to the environment, and messages to the user."""
    assert request.model is not None, "checked when it was parsed"
    command = [sys.executable, "-m", MODULE, "--model-path", request.model]
    command += ["--host", request.host, "--port", str(request.port)]
    added = {KEY: request.api_key} if request.api_key else {}
    notes = [f"serving {request.model} at {serving.url_of(request)}"]
    if environ.get(LOGPROBS):
        notes.append(f"{LOGPROBS} is set aside: log-probs must be those at the sampling temperature")
    if request.has("enable-lora"):
        for name, value in LORA_DEFAULTS.items():
            if not request.has(name):
                command += [f"--{name}", value]
    return command + request.flags, added, notes
