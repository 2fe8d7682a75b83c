"""A training run with a server that it starts itself and that stops answering; a test interrupts or kills it.

Usage: served_run.py OUTPUT PATH NUMBER: the server never answers the NUMBERth request to PATH. Its log is in OUTPUT.
"""

import sys
from pathlib import Path

import torch

from covey.engines.servers.server_process import ServerProcess, free_port
from tests.support import runs
from tests.support.servers import fake_vllm

if __name__ == "__main__":
    output, path, number = sys.argv[1:]
    torch.set_num_threads(1)
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, fake_vllm.__file__, str(port), path, number]
    with ServerProcess(command, f"{url}/health", log_path=Path(output) / "server.log", deadline=120):
        settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": 0}
        runs.trainer(output, **settings).train()
