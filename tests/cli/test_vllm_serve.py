"""What `covey vllm-serve` makes of its arguments; the server itself is started in tests/real_vllm."""

import importlib.metadata
import os
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from covey.cli import serving
from covey.cli.main import main
from covey.cli.serving import check_port
from covey.cli.vllm_serve import VLLM, plan, runs_on_cpu
from covey.runtime.hosts import is_local
from tests.support.launching import free_port


def parse(argv, environ):
    return serving.parse(argv, environ, VLLM)


def command(*argv: str, environ: dict[str, str] | None = None, on_cpu: bool = False) -> list[str]:
    return plan(parse(argv, environ or {}), environ or {}, on_cpu)[0]


def added(*argv: str, environ: dict[str, str] | None = None, on_cpu: bool = False) -> dict[str, str]:
    return plan(parse(argv, environ or {}), environ or {}, on_cpu)[1]


@pytest.fixture
def vllm_version(monkeypatch):
    """Pretends that a version of vLLM is installed, or none."""
    real = importlib.metadata.version

    def pretend(found: str | None):
        def version(name: str) -> str:
            if name != "vllm":
                return real(name)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def test_it_listens_on_localhost_with_the_training_routes():
    words = command("--model", "m")
    assert words[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "m"]
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--port") + 1] == "8000"
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert words[words.index("--worker-extension-cls") + 1].endswith("CoveyWorker")
    assert "--enable-sleep-mode" in words
    assert added("--model", "m") == {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.parametrize("spelling", ["--max-model-len 512", "--max_model_len 512", "--max_model_len=512"])
def test_unknown_flags_reach_vllm_in_its_own_spelling(spelling: str):
    assert shlex.join(command("m", *shlex.split(spelling))).replace("=", " ").endswith(" --max-model-len 512")


def test_keys_of_json_flags_and_values_keep_their_underscores():
    words = command("m", "--hf_overrides.rope_theta", "5", "--served_model_name", "my_model", "-tp", "2")
    assert words[-6:] == ["--hf-overrides.rope_theta", "5", "--served-model-name", "my_model", "-tp", "2"]


def test_switches_written_as_values_become_switches():
    words = command("m", "--enforce_eager", "True", "--enable_prefix_caching=false", "--trust_remote_code")
    assert words[-3:] == ["--enforce-eager", "--no-enable-prefix-caching", "--trust-remote-code"]


def test_names_that_differ_from_vllms_are_translated():
    assert command("m", "--vllm_model_impl", "transformers", "--log_level=debug")[-3:] == [
        "--model-impl", "transformers", "--uvicorn-log-level=debug",
    ]  # fmt: skip
    swift = ["--vllm_tensor_parallel_size", "2", "--vllm_data_parallel_size=2"]
    assert command("m", *swift)[-3:] == ["--tensor-parallel-size", "2", "--data-parallel-size=2"]


def test_a_config_file_holds_flags_the_model_among_them(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\nport: 9000\nmax_model_len: 512\nenforce_eager: true\nenable_prefix_caching: false\n")
    expected = command("m", "--port=9000", "--max-model-len=512", "--enforce-eager", "--no-enable-prefix-caching")
    assert command("--config", str(file)) == command(f"--config={file}") == expected
    other = command("other", "--config", str(file), "--port", "9001")  # the command line overrides the file
    assert other[4] == "other" and other[other.index("--port") + 1] == "9001"


def test_a_config_file_is_checked_like_the_command_line(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\nhost: 0.0.0.0\n")
    with pytest.raises(ValueError, match="lets other machines in"):
        parse(["--config", str(file)], {})
    file.write_text("max_model_len: 512\n")
    with pytest.raises(ValueError, match="which model"):
        parse(["--config", str(file)], {})
    file.write_text("[a, b]")
    with pytest.raises(ValueError, match="must be a mapping of flags"):
        parse(["--config", str(file)], {})
    with pytest.raises(ValueError, match=r"missing\.yaml.*Give a YAML file of flags"):
        parse(["--config", "missing.yaml"], {})


def test_what_the_user_gives_wins_over_what_would_be_added():
    words = command("m", "--logprobs-mode=raw_logprobs", "--no-enable-sleep-mode", "--generation_config", "auto")
    assert "processed_logprobs" not in words
    assert "--enable-sleep-mode" not in words
    assert words.count("--generation-config") == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "trainer.example"])
def test_an_open_door_needs_a_key(host: str):
    with pytest.raises(ValueError, match=rf"--host {host} lets other machines in.*VLLM_API_KEY.*127\.0\.0\.1"):
        parse(["m", "--host", host], {})
    assert parse(["m", "--host", host], {"VLLM_API_KEY": "k"}).api_key == "k"
    assert parse(["m", "--host", host, "--api_key", "k"], {}).api_key == "k"
    with pytest.raises(ValueError, match="lets other machines in"):
        parse(["m", "--host", host], {"VLLM_API_KEY": ""})


@pytest.mark.parametrize("abbreviated", ["--hos 0.0.0.0", "--ho=0.0.0.0", "--api-k secret", "--por 1"])
def test_no_abbreviation_gets_past_what_is_checked(abbreviated: str):
    with pytest.raises(ValueError, match=r"write --(host|api-key|port) in full"):
        parse(["--model", "m", *abbreviated.split()], {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "localhost", "::1", "[::1]"])
def test_no_key_is_needed_where_nobody_else_can_reach(host: str):
    assert is_local(host)
    assert parse(["m", "--host", host], {}).api_key is None


def test_a_key_travels_in_the_environment_and_guards_every_route():
    arguments = ["m", "--api-key", "secret-1"]
    assert "secret-1" not in shlex.join(command(*arguments))
    assert added(*arguments)["VLLM_API_KEY"] == "secret-1"
    words = command(*arguments)
    assert words[words.index("--middleware") + 1] == "covey.engines.servers.vllm.launch.RequireKey"
    assert "--middleware" not in command("m")


def test_adapters_may_be_loaded_while_it_runs_if_lora_is_on():
    assert added("m", "--enable-lora")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in added("m", "--enable_lora", "false")
    words = command("m", "--enable-lora")
    assert words[words.index("--max-loras") + 1] == words[words.index("--max-cpu-loras") + 1] == "3"
    assert "--max-cpu-loras" not in command("m", "--enable-lora", "--max-loras=8")
    # several front ends would each know adapters of their own
    assert "--api-server-count" in command("m", "--enable-lora", "--data_parallel_size=2")
    assert "--api-server-count" in command("m", "--enable-lora", "-dp", "2")
    assert "--api-server-count" not in command("m", "--enable-lora", "--data-parallel-size", "1")
    assert "--api-server-count" not in command("m", "--data-parallel-size", "2")


def test_on_a_cpu_unset_variables_are_set_and_printed():
    environ = {"VLLM_CPU_KVCACHE_SPACE": "7", "OMP_NUM_THREADS": "3"}
    words, variables, notes = plan(parse(["m"], environ), environ, on_cpu=True)
    assert "VLLM_CPU_KVCACHE_SPACE" not in variables and "OMP_NUM_THREADS" not in variables
    assert variables["VLLM_TARGET_DEVICE"] == "cpu"
    assert "--enforce-eager" in words and "--enable-sleep-mode" not in words
    said = notes[-1]
    for name, value in variables.items():
        assert name == "VLLM_SERVER_DEV_MODE" or f"{name}={value}" in said
    assert "--enforce-eager" in said


def test_a_cpu_without_bfloat16_defaults_to_float32(monkeypatch):
    from covey.config import hardware

    monkeypatch.setattr(hardware, "cpu_multiplies_bf16", lambda: False)
    words = command("m", on_cpu=True)
    assert words[words.index("--dtype") + 1] == "float32"
    words = command("m", "--dtype", "bfloat16", "--no-enforce-eager", on_cpu=True)
    assert words.count("--dtype") == 1 and words[words.index("--dtype") + 1] == "bfloat16"
    assert "--enforce-eager" not in words
    assert "--no-enable-chunked-prefill" in words
    assert "--no-enable-chunked-prefill" not in command("m", "--enable-chunked-prefill", on_cpu=True)
    monkeypatch.setattr(hardware, "cpu_multiplies_bf16", lambda: True)
    assert "--dtype" not in command("m", on_cpu=True)


def test_the_build_of_vllm_decides_where_it_computes():
    assert runs_on_cpu("0.32.0+cpu", {})
    assert runs_on_cpu("0.32.0", {"VLLM_TARGET_DEVICE": "cpu"})
    assert not runs_on_cpu("0.32.0", {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "8000"], "which model"),
        (["m", "--port", "80000"], "--port 80000"),
        (["m", "--port", "http"], "--port http"),
        (["m", "--host"], "--host needs a value"),
        (["--model", "--port", "1"], "--model needs a value"),
        (["m", "--grpc"], "--grpc opens a server that asks for no key"),
        (["m", "--enable-lora=yes"], "neither true nor false; write --enable-lora or --no-enable-lora"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: list[str], words: str):
    with pytest.raises(ValueError, match=words):
        parse(arguments, {})


def test_without_vllm_it_says_how_to_get_it(vllm_version, capsys):
    vllm_version(None)
    assert main(["vllm-serve", "--model", "m"]) == 2
    assert "pip install vllm" in capsys.readouterr().err


@pytest.mark.parametrize(("found", "good"), [("0.27.1", False), ("0.28.0", True), ("0.32.0+cpu", True), ("1.0", True)])
def test_a_vllm_without_the_routes_is_too_old(vllm_version, found: str, good: bool):
    vllm_version(found)
    if good:
        assert VLLM.installed() == found
    else:
        with pytest.raises(ImportError, match=rf"vLLM {found} is too old.*vllm>=0\.28"):
            VLLM.installed()


def test_the_oldest_vllm_is_the_one_that_the_extra_asks_for():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, VLLM.oldest))
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={oldest}"]


def test_a_taken_port_is_noticed_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := free_port()))
        taken.listen()
        with pytest.raises(ValueError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_a_dry_run_prints_a_shell_command_without_the_key(vllm_version, capsys):
    vllm_version("0.32.0")
    assert main(["vllm-serve", "my model", "--api-key", "hush", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "hush" not in printed
    words = shlex.split(printed)
    assert "VLLM_SERVER_DEV_MODE=1" in words and "VLLM_API_KEY=..." in words and "my model" in words


def test_it_becomes_the_server(tmp_path):
    """A package called vllm that prints its process and arguments shows that nothing stands in between."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text("import os, sys; print(os.getpid(), sys.argv[1:], os.environ['VLLM_API_KEY'])")
    metadata = tmp_path / "vllm-0.32.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "covey.cli.main", "vllm-serve", "m", f"--port={port}", "--api-key=k", "--seed", "1"],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    printed = process.communicate(timeout=120)[0]
    assert printed.startswith(f"{process.pid} ['serve', 'm', ")
    assert printed.strip().endswith("'--seed', '1'] k")


def test_help_names_the_flags_and_the_danger(capsys):
    assert main(["vllm-serve", "-h"]) == 0
    text = capsys.readouterr().out
    assert "--tensor-parallel-size" in text and "VLLM_API_KEY" in text
    assert max(len(line) for line in text.splitlines()) <= 120
