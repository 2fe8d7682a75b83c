"""Starting the fake SGLang server as a process of its own, and talking to it, for tests."""

import asyncio
import json
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from covey.core.engine import SampleRequest, SamplingParams, TensorSpec, WeightUpdate
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.server_process import free_port
from tests.support import forking, launching
from tests.support.servers import fake_sglang

FAKE = Path(__file__).with_name("fake_sglang.py")


class Fake:
    """A fake server, somewhere."""

    url: str

    def fail(self, path: str, **how: Any) -> None:
        """Let the next requests of a path fail: status and text, hang, die; times (1)."""
        self._post("/_fail", {"path": path, **how})

    def log(self) -> list[Any]:
        """[path, body] of what was asked of it."""
        with urllib.request.urlopen(f"{self.url}/_log") as answer:
            return json.load(answer)

    def paths(self) -> list[str]:
        return [path for path, _ in self.log()]

    def _post(self, path: str, body: Any) -> None:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request):
            pass


class OwnProcess(Fake):
    """A fake server in a process of its own, which joins process groups and may be killed."""

    def __init__(self, model: str, folder: Path, *options: str):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(FAKE), "--model-path", model, "--port", str(port), *options]
        with (folder / f"fake-{port}.log").open("w") as log:
            self.process = forking.Forked(command, env=launching.environment(), stdout=log, stderr=log)
        until = time.monotonic() + 90
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < until, Path(log.name).read_text()
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(30)


class InThread(Fake):
    """A fake server in a thread of this process, for everything else."""

    def __init__(self, model: str, *options: str):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        chosen = fake_sglang.options(["--model-path", model, "--port", str(port), "--in-process", *options])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(chosen), self._loop).result(60)

    async def _start(self, chosen: Any) -> Any:
        self.server = fake_sglang.FakeSglang(chosen)
        runner = web.AppRunner(self.server.app(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, chosen.host, chosen.port).start()
        return runner

    def misbehaves(self) -> bool:
        """Tell whether requests that are to fail are still to come."""
        return any(failure["times"] for failure in self.server.failures.values())

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def request(n: int = 2, max_tokens: int = 6, prompt: Any = (5, 6, 7), seed: int = 3, **params: Any) -> SampleRequest:
    return SampleRequest(list(prompt), n, SamplingParams(max_tokens=max_tokens, **params), [seed + i for i in range(n)])


def call(url: str, work: Any, api_key: str | None = None) -> Any:
    """The result of the coroutine `work(server)`, in a loop of its own."""
    return asyncio.run(work(ServerClient(url, api_key)))


def update(model: Any, version: int, dtype: torch.dtype | None = None) -> WeightUpdate:
    """A model's parameters as an update."""
    named = {name: tensor.detach().to(dtype or tensor.dtype) for name, tensor in model.named_parameters()}
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named.items())
    return WeightUpdate(version, specs, lambda: iter(named.items()))


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Tokens that transformers' own `generate` continues the prompt with."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def logprobs_of(model: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
