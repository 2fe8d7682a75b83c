"""`covey sglang-serve`: SGLang's own server, started with what training needs, safe by default."""

import functools
import sys
from collections.abc import Mapping

from covey.cli.serving import Backend, Plan, Request, serve
from covey.engines.servers.sglang.launch import KEY, LOGPROBS, MODULE

LORA_DEFAULTS: dict[str, str | None] = {"max-lora-rank": "64", "lora-target-modules": "all"}
"""Flags about later adapters, which SGLang requires of a server that starts without one."""

HELP = """\
usage: covey sglang-serve --model M [--flag value ...]

Start SGLang's server with what training needs: token ids in and out with log-probs of what is sampled from, weight
updates, pause and continue, cache flushes. It listens on 127.0.0.1 by default.

{own}

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

SGLANG = Backend(
    name="SGLang",
    package="sglang",
    oldest=(0, 5, 23),
    where=", best in an environment of its own, on a machine with a GPU",
    key=KEY,
    port=30000,
    help=HELP,
)


def plan(request: Request, environ: Mapping[str, str]) -> Plan:
    program = [sys.executable, "-m", MODULE, "--model-path", request.model]
    defaults = LORA_DEFAULTS if request.has("enable-lora") else {}
    added = {KEY: request.api_key} if request.api_key else {}
    aside = f"{LOGPROBS} is ignored: log-probs must be those at the sampling temperature"
    return request.command(program, defaults), added, [aside] if environ.get(LOGPROBS) else []


main = functools.partial(serve, backend=SGLANG, plan=plan)
