"""Two processes with vLLM in them: a model for each, and one that they share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import free_port

pytest.importorskip("vllm.sampling_params")

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent


def logged(folder, size):
    """What two processes log that share each vLLM model `size` ways."""
    port = free_port()
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    command = [
        sys.executable,
        *launcher,
        "--master_port",
        str(port),
        str(HERE / "two_processes.py"),
        str(folder),
        str(size),
    ]
    path = os.pathsep.join([str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    [line] = [line for line in done.stdout.splitlines() if "LOGGED " in line]
    return json.loads(line.partition("LOGGED ")[2])


def test_processes_that_share_a_model_train_like_others(tmp_path):
    own, shared = logged(tmp_path / "own", 1), logged(tmp_path / "shared", 2)
    for run in (own, shared):
        assert len(run["reward"]) == 3
        assert max(run["sampling/sampling_logp_difference/max"]) < 1e-3
    # The same seeds draw the same tokens but where rounding decides between two that all but tie.
    assert shared["reward"] == pytest.approx(own["reward"], abs=0.5)
    assert shared["reward"][0] == pytest.approx(own["reward"][0], abs=1e-3)
