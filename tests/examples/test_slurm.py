"""The recipe for Slurm: a dry run prints commands that each part of Covey and accelerate takes."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from covey.cli import serving
from covey.cli.config_file import load_run
from covey.cli.launch import launch_command
from covey.cli.run_file import take_config
from covey.cli.vllm_serve import VLLM

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "multi_node.sh"


def dry_run(*words, **variables):
    """The commands that would be run, as lists of words."""
    environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", **variables}
    done = subprocess.run(
        ["bash", str(SCRIPT), *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("+ ") for line in lines)
    return [shlex.split(line[2:]) for line in lines]


def after(words, flag):
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_four_nodes_train_and_the_fifth_samples(method):
    serve, train = dry_run(method, f"examples/slurm/{method}_70b.yaml", "--seed", "7", NODES="n1 n2 n3 n4 n5")
    assert {"--nodelist=n5", "--ntasks=1", "--gpus-per-node=8"} <= set(serve[:8])
    server = serve[serve.index("covey") :]
    assert server[:2] == ["covey", "vllm-serve"]
    request = serving.parse(server[2:], {"VLLM_API_KEY": "key"}, VLLM)
    assert (request.model, request.host, request.port) == ("Qwen/Qwen2.5-72B-Instruct", "n5", 8000)
    assert after(server, "--tensor-parallel-size") == "8"

    assert {"--nodelist=n1,n2,n3,n4", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1"} <= set(train[:8])
    assert train[-3:-1] == ["bash", "-c"]
    on_node = shlex.split(train[-1].replace("$SLURM_PROCID", "2"))
    assert on_node[:3] == ["exec", "covey", method]
    command = launch_command(method, on_node[3:])
    options = command[3 : command.index("--module")]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*options, "train.py"]))
    assert (args.use_fsdp, args.num_processes, args.num_machines, args.machine_rank) == (True, 32, 4, 2)
    assert (args.main_process_ip, args.main_process_port) == ("n1", 29500)

    path, flags = take_config(command[command.index(method) + 1 :])
    on_cpu = ["--bf16", "false", "--use_cpu", "true"]
    run = load_run(ROOT / path, [*flags, *on_cpu], method=method, world_size=32)
    assert not [*run.missing("model", "dataset", "reward_funcs")]
    assert (run.args.seed, run.args.vllm_urls) == (7, ["http://n5:8000"])
    assert run.args.algebra(32).completions_per_update == 512


def test_variables_change_the_shape_of_the_job():
    serve, train = dry_run(
        *["grpo", "examples/slurm/grpo_70b.yaml"],
        **{"NODES": "a b", "GPUS": "4", "CONFIG": "zero3", "MODEL": "my/model", "SERVER_PORT": "9000"},
        **{"MAIN_PORT": "3000", "SERVER_FLAGS": "--max-model-len 8192 --enable-prefix-caching"},
    )
    assert (after(serve, "--model"), after(serve, "--port")) == ("my/model", "9000")
    assert serve[-3:] == ["--max-model-len", "8192", "--enable-prefix-caching"]
    on_node = shlex.split(train[-1])
    assert (after(on_node, "--accelerate_config"), after(on_node, "--num_processes")) == ("zero3", "4")
    assert (after(on_node, "--main_process_ip"), after(on_node, "--main_process_port")) == ("a", "3000")
    assert after(on_node, "--vllm_server_base_url") == "http://b:9000"


def test_no_key_is_printed():
    commands = dry_run("grpo", "run.yaml", NODES="a b", MODEL="m", VLLM_API_KEY="sesame")
    assert not any("sesame" in word for words in commands for word in words)


@pytest.mark.parametrize("words", [(), ("grpo",)])
def test_without_a_method_and_a_run_file_it_says_how_it_is_used(words):
    done = subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage: multi_node.sh METHOD RUN_FILE" in done.stderr


def test_one_node_is_too_few():
    environment = {"PATH": os.environ["PATH"], "NODES": "a", "MODEL": "m"}
    done = subprocess.run(["bash", str(SCRIPT), "grpo", "run.yaml"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "two nodes or more" in done.stderr


def test_arguments_with_spaces_and_quotes_arrive_as_they_were():
    _, train = dry_run("grpo", "run.yaml", "--generation_kwargs", '{"a b": "$x"}', NODES="a b", MODEL="m")
    assert after(shlex.split(train[-1]), "--generation_kwargs") == '{"a b": "$x"}'


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_each_job_file_starts_its_own_method(method):
    text = (ROOT / "examples" / "slurm" / f"{method}_70b.sbatch").read_text()
    assert "#SBATCH --nodes=5" in text
    assert f"multi_node.sh {method} examples/slurm/{method}_70b.yaml" in text
