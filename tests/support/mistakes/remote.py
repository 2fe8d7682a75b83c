"""Mistakes with inference servers that a run samples from; the servers are small, and speak like vLLM's."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from covey.core.engine import WeightUpdate
from covey.engines.servers.errors import BadAnswer, NoServerLeft, ServerRefused
from covey.policy.weights import weight_update
from tests.support import runs, tiny
from tests.support.mistakes.cases import CONFIG, TRAINING, Bench, Mistake, checked
from tests.support.servers import fake_vllm
from tests.support.servers.fake_vllm import FakeVllm


def sampling(settings: dict[str, Any] | None = None, fault: Callable[[FakeVllm], None] | None = None, **options: Any):
    """Trains with a server that was started with `options` and does `fault` once the trainer has been made."""

    def make(bench: Bench) -> Any:
        options.setdefault("name", "tiny")
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(FakeVllm(options.pop("model", None) or tiny.model(), **options))
            given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
            stack.enter_context(patch.dict("os.environ", {"VLLM_API_KEY": ""}))
            trainer = bench.build({**given, "vllm_server_timeout": 1.0, **(settings or {})})
            stack.callback(trainer.collector.engine.close)
            if fault is not None:
                fault(server)
            return trainer.train()

    return make


def absent(bench: Bench) -> Any:
    """Names a server that has ended."""
    with FakeVllm(tiny.model()) as server:
        url = server.url
    named = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 0.5}
    return bench.build(named)


def something_else(bench: Bench) -> Any:
    with FakeVllm(tiny.model()) as server:
        server.misbehave("/version", fake_vllm.status(404, "Not Found"))
        return bench.build({"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url})


def from_a_folder(bench: Bench) -> Any:
    """Trains a model that was saved under another name than the server's."""
    with FakeVllm(tiny.model(), name="other") as server:
        given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        bench.build(given, model=bench.folder).collector.engine.close()


def damaged(server: FakeVllm) -> None:
    def change(answer: dict[str, Any]) -> None:
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = float("nan")

    server.misbehave("/v1/completions", fake_vllm.edited(change), times=99)


def another_run(bench: Bench) -> Any:
    """Trains while another run sends weights to the same server."""
    with FakeVllm(tiny.model()) as server:
        given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        one, other = bench.build(given), bench.build(given)
        try:
            update: WeightUpdate = weight_update(other.policy, 0)
            one.collector.engine.load_weights(update)
            other.collector.engine.load_weights(update)
            one.weight_sync.ensure_current = lambda version: {}  # it has sent its weights already
            return one.train()
        finally:
            one.collector.engine.close()
            other.collector.engine.close()


def sleeping_for_several(bench: Bench) -> Any:
    from types import SimpleNamespace

    from covey.trainer.engines.servers import vllm_servers

    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True}
    several: Any = SimpleNamespace(num_processes=2)
    return vllm_servers(runs.config("unused", **settings), tiny.model(), tiny.tokenizer(), several, 256)


REMOTE = [
    Mistake("Sampled from a server that is not there", absent, ("1 of 1",), kind=NoServerLeft),
    Mistake("Sampled from something that is not vLLM", something_else, ("covey vllm-serve",), kind=ServerRefused),
    Mistake(
        "Sampled from a vLLM server that was started without the routes for training",
        sampling(dev_mode=False),
        ("VLLM_SERVER_DEV_MODE=1",),
        kind=ServerRefused,
    ),
    Mistake(
        "Sampled from a vLLM server on a CPU that computes prompts in pieces",
        sampling(in_pieces=True),
        ("--no-enable-chunked-prefill",),
        kind=ServerRefused,
    ),
    Mistake("Sampled from an old vLLM server", sampling(release="0.9.1"), (r"0\.9\.1",), kind=ServerRefused),
    Mistake(
        "Sampled from a server without its key, or with a wrong one",
        sampling(api_key="k"),
        ("HTTP", "401"),
        kind=ServerRefused,
    ),
    Mistake(
        "Sampled at a temperature with a server that reports raw log-probs",
        sampling({"temperature": 0.8}),
        (r"0\.8", "--logprobs-mode processed_logprobs"),
        kind=ServerRefused,
    ),
    Mistake(
        "Sampled from a server of another model",
        sampling(model=tiny.model(vocab_size=80)),
        ("103",),
        kind=ServerRefused,
    ),
    Mistake(
        "Sampled from a server that was started with another path",
        from_a_folder,
        ("'/models/other'",),
        kind=UserWarning,
    ),
    Mistake(
        "Sampled from a server with a shorter context than the model's",
        sampling(max_model_len=64),
        ("64", "256", "--max-model-len"),
        kind=UserWarning,
    ),
    Mistake(
        "Gave generation_kwargs that the server does not know",
        sampling({"generation_kwargs": {"min_token": 2}}),
        ("'min_token'", "'min_tokens'"),
        kind=ServerRefused,
    ),
    Mistake(
        "Gave generation_kwargs that requests decide themselves",
        sampling({"generation_kwargs": {"stream": True}}),
        ("stream",),
    ),
    checked(
        "Gave an address that is no URL",
        lambda bench: bench.config(use_vllm=True, vllm_mode="server", vllm_server_base_url="localhost:8000"),
        "setting-format",
        "'localhost:8000'",
        "http://HOST:PORT",
        when=CONFIG,
    ),
    checked(
        "Gave an address with a password in it",
        lambda bench: bench.config(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://me:secret@a:8000"),
        "secret-in-url",
        "vllm_server_api_key",
        when=CONFIG,
    ),
    Mistake(
        "Trained while all servers failed",
        sampling(fault=lambda server: server.kill()),
        ("none of 1",),
        when=TRAINING,
        kind=NoServerLeft,
    ),
    Mistake("Trained two runs with one server", another_run, ("covey-[0-9a-f]+-0",), when=TRAINING, kind=ServerRefused),
    Mistake(
        "Sampled from a server with damaged weights, or one that overflows",
        sampling(fault=damaged),
        ("nan", "bfloat16"),
        when=TRAINING,
        kind=BadAnswer,
    ),
    checked(
        "Put servers to sleep that several processes sample from",
        sleeping_for_several,
        "server-sleep",
        "vllm_enable_sleep_mode=True",
        when=CONFIG,
    ),
]
