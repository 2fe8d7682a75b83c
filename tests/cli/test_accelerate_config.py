"""`--accelerate_config` starts the same command on many processes; the configs are what accelerate reads."""

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from covey.cli.launch import find_config, launch_command, launch_if_asked, main
from covey.runtime import files
from tests.support import forking
from tests.support.launching import environment, free_port, run


@pytest.fixture
def usual_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


NAMES = ("cpu_2proc", "fsdp2", "multi_gpu", "zero1", "zero2", "zero3")
SETS = {
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
    "zero1": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"},
    "cpu_2proc": {"CUDA_VISIBLE_DEVICES": "-1,-1"},
    "multi_gpu": {"ACCELERATE_MIXED_PRECISION": "no"},
}


def test_the_configs_that_come_with_covey():
    assert sorted(path.stem for path in files.shipped("examples/accelerate_configs").glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_each_config_as_it_is_meant(name):
    words = ["--config_file", str(find_config(name)), "--main_process_port", "0", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        _, found = prepare_deepspeed_cmd_env(args)
    else:
        assert args.multi_gpu or args.use_fsdp
        found = prepare_multi_gpu_env(args)
    assert found.items() >= SETS[name].items()
    assert args.nproc_per_node == ("2" if name == "cpu_2proc" else "8")


def test_the_launched_command_lacks_the_launcher_flags(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("")
    words = ["run.yaml", f"--accelerate_config={own}", "--num_processes", "4", "--beta", "0.1", "--machine_rank=1"]
    assert launch_command("rloo", words) == [
        *[sys.executable, "-m", "covey.cli.launch", "--config_file", str(own)],
        *["--num_processes", "4", "--machine_rank", "1"],
        *["--module", "covey.cli.main", "rloo", "run.yaml", "--beta", "0.1"],
    ]


def test_without_a_config_nothing_is_launched(monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *command: pytest.fail("launched"))
    words = ["run.yaml", "--num_processes", "4"]
    assert launch_command("grpo", words) is None
    assert launch_if_asked("grpo", words) == words


def test_a_missing_deepspeed_is_named_before_the_launch(monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *command: pytest.fail("launched"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ImportError, match="'zero3' shards with DeepSpeed, which is not installed: pip install"):
        launch_if_asked("grpo", ["run.yaml", "--accelerate_config", "zero3"])


def test_a_flag_needs_its_value():
    with pytest.raises(ValueError, match="--accelerate_config"):
        launch_command("grpo", ["--accelerate_config", "--beta", "0.1"])


def test_a_config_is_found_in_the_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "covey"
    configs = package / "examples" / "accelerate_configs"
    configs.mkdir(parents=True)
    (configs / "fsdp2.yaml").write_text("")
    monkeypatch.setattr(files, "__file__", str(package / "runtime" / "files.py"))
    assert find_config("fsdp2") == configs / "fsdp2.yaml"


@pytest.mark.slow
def test_two_processes_train_from_one_command(tmp_path, tiny_folder):
    """`covey grpo --accelerate_config cpu_2proc`, for real."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(8))
    )
    settings = {
        "model": str(tiny_folder),
        "dataset": str(tmp_path / "rows.jsonl"),
        "reward_funcs": ["numeric_match_reward"],
    }
    settings |= {"output_dir": str(tmp_path / "out"), "max_steps": 1, "num_generations": 2, "max_completion_length": 4}
    settings |= {"per_device_train_batch_size": 4, "report_to": "none"}
    (tmp_path / "run.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "covey.cli.main", "grpo", str(tmp_path / "run.json")]
    command += ["--accelerate_config", "cpu_2proc", "--main_process_port", str(free_port())]
    printed = run(command, HF_DATASETS_CACHE=str(tmp_path / "cache"))
    assert printed.count("step 1/1  reward") == 1  # the first process alone reports
    assert (tmp_path / "out" / "model.safetensors").exists()
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["log_history"][0]["num_tokens"] > 8 * 4  # prompts and completions of both processes


@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [
        (ChildFailedError("covey", {1: ProcessFailure(1, 7, 2, "none")}), 2, ""),
        (ChildFailedError("covey", {1: ProcessFailure(1, 7, -9, "none")}), 137, "process 1 was ended by SIGKILL, as"),
        (subprocess.CalledProcessError(2, "covey"), 2, ""),
        (subprocess.CalledProcessError(-signal.SIGKILL, "covey"), 137, ""),
        (KeyboardInterrupt(), 130, ""),
        (SignalException("", signal.SIGTERM), 143, ""),
    ],
    ids=["error", "killed", "error of one", "killed alone", "interrupted", "terminated"],
)
def test_the_launcher_ends_without_a_traceback(monkeypatch, capsys, usual_signals, raised, status, says):
    def launch():
        raise raised

    monkeypatch.setattr("accelerate.commands.launch.main", launch)
    assert main() == status
    said = capsys.readouterr().err
    assert says in said and bool(said) == bool(says)


ALONE = """
import os, signal, subprocess, sys, threading
import accelerate.commands.launch as launcher
from covey.cli.launch import main

def launch():
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    subprocess.run([sys.executable, "-c", "import time; time.sleep(30)"], check=True)

launcher.main = launch if sys.argv[1] == "training" else lambda: signal.raise_signal(signal.SIGTERM)
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["training", "starting"])
def test_sigterm_ends_a_single_process_too(state):
    """Accelerate's launcher of one process would end alone, and leave it training."""
    done = forking.run([sys.executable, "-c", ALONE, state], env=environment(), timeout=25)
    assert done.returncode == 143 and "Traceback" not in done.stderr, done.stderr
