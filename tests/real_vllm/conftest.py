"""Real vLLM servers, started by `covey vllm-serve` as users do; each is shared by all tests that ask for it.

    server            the tiny model, with LoRA up to rank 8
    second_server     another of the same
    start_server      starts one with flags of your own, for the length of a test

The folder is not called `vllm`: where vLLM is not installed, Python would take it for that. A server takes half a
minute to start. Tests that change its weights leave them changed: send your own first.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.real_vllm.serving import SHAPE, Running, serve
from tests.support import tiny


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory) -> str:
    """The folder of the tiny model that servers are started with."""
    return tiny.folder(tmp_path_factory.mktemp("model") / "tiny-llama", **SHAPE)


@pytest.fixture(scope="session")
def server(tmp_path_factory, vllm_model) -> Iterator[Running]:
    """A server for everybody."""
    running = serve(tmp_path_factory.mktemp("server"), vllm_model, "--enable-lora", "--max-lora-rank", "8")
    yield running
    running.process.stop()


@pytest.fixture(scope="session")
def second_server(tmp_path_factory, vllm_model) -> Iterator[Running]:
    """Another one, for what takes two."""
    running = serve(tmp_path_factory.mktemp("second"), vllm_model, "--enable-lora", "--max-lora-rank", "8")
    yield running
    running.process.stop()


@pytest.fixture
def start_server(tmp_path, vllm_model) -> Iterator[Callable[..., Running]]:
    """Starts servers that end with the test; takes flags for them, another `model`, and `env`."""
    started: list[Running] = []

    def start(*flags: str, **options: Any) -> Running:
        started.append(serve(tmp_path, options.pop("model", vllm_model), *flags, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.stop()
