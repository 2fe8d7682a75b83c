"""Starting real vLLM servers for tests; the fixtures beside this file use it, and so may scripts."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from covey.engines.servers.server_process import ServerProcess, free_port

START_SECONDS = 420.0
"""Alone on two cores it takes half a minute; the machine may be busy, and a first start compiles."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),  # that of this process is for tiny models
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
}

SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
"""Of the tiny model: vLLM's attention wants heads of 32 at least."""


@dataclass
class Running:
    """A server that is up: where it is, its process, and the folder of its model."""

    url: str
    process: ServerProcess
    model: str

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self.process.log_path.read_text(errors="replace")


def serve(folder: Path, model: str, *flags: str, env: dict[str, str] | None = None, port: int = 0) -> Running:
    """Start `covey vllm-serve` and wait for it."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "covey.cli.main", "vllm-serve", "--model", model, "--port", str(port)]
    command += ["--max-model-len", "256", "--max-num-seqs", "64", "--gpu-memory-utilization", "0.3"]
    command += ["--dtype", "float32", *flags]
    process = ServerProcess(
        command,
        f"{url}/health",
        log_path=folder / f"server-{port}.log",
        deadline=START_SECONDS,
        env={**ENVIRONMENT, **(env or {})},
        name="vLLM",
    )
    return Running(url, process.start(), model)
