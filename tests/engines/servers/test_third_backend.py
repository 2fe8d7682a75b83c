"""A third server backend: its API code alone gives sampling, failover and every shared part of the weight path."""

import asyncio
import base64
import contextlib
import threading
from pathlib import Path

import pytest
import torch
from aiohttp import web

from covey.core.engine import SampleRequest, SamplingParams, TensorSpec, WeightUpdate
from covey.core.records import Completion, FinishReason
from covey.engines.servers.engine import RemoteEngine
from covey.engines.servers.errors import ServerError
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import SampledChunk, ServerFacts, SettingNames
from covey.engines.servers.server_process import free_port
from covey.engines.servers.weights.api import WeightApi, WeightEndpoint
from covey.engines.servers.weights.buckets import unpack
from covey.engines.servers.weights.files import read_folder
from covey.engines.servers.weights.sender import WeightSender


class StubApi:
    """Sampling requests of the stub server."""

    name = "Stub"
    settings = SettingNames("timeout", "request_timeout", "sync_timeout", "--context")

    async def probe(self, server, deadline):
        info = await server.call("GET", "/info", doing="read its properties", deadline=deadline)
        return ServerFacts(model=info["model"])

    async def check_alive(self, server, deadline):
        await server.call("GET", "/info", doing="check its health", deadline=deadline)

    async def generate(self, server, request, *, model, ends, deadline):
        body = {"prompt": request.prompt_ids, "n": request.n, "max_tokens": request.params.max_tokens}
        answer = await server.ask("/sample", doing="generate", deadline=deadline, body=body)
        return [
            SampledChunk(Completion(item["tokens"], item["logprobs"], FinishReason.LENGTH))
            for item in answer["completions"]
        ]

    async def pause(self, server, deadline):
        await server.call("POST", "/pause", doing="pause", deadline=deadline)

    async def resume(self, server, deadline):
        await server.call("POST", "/resume", doing="resume", deadline=deadline)

    async def clear_prefix_cache(self, server, deadline):
        """The stub has none."""

    async def sleep(self, server, level, deadline):
        """The stub keeps its memory."""

    async def wake(self, server, deadline):
        """The stub keeps its memory."""


class StubWeightApi(WeightApi):
    """Weight requests of the stub server: buckets inside requests, or folders."""

    name = "stub"
    methods = automatic = ("inline", "disk")

    async def probe(self, server, until):
        return WeightEndpoint(server, same_machine=True)

    async def load_folder(self, endpoint, folder, stamp, until):
        body = {"folder": str(folder), "version": stamp}
        await self._post(endpoint, "/weights/folder", until, body)

    async def begin(self, endpoint, until):
        await self._post(endpoint, "/weights/begin", until, {})

    async def push(self, endpoint, channel, bucket, stamp, until):
        data = base64.b64encode(bucket.data.numpy().tobytes()).decode()
        body = {"manifest": bucket.manifest(), "data": data}
        await self._post(endpoint, "/weights/bucket", until, body, f"{until.doing} ({bucket})")

    async def end(self, endpoint, stamp, until):
        await self._post(endpoint, "/weights/end", until, {"version": stamp})

    async def write_stamp(self, server, stamp, deadline):
        body = {"version": stamp}
        await server.call("POST", "/version", doing="record its version", deadline=deadline, body=body)

    async def read_stamp(self, server, deadline):
        return (await server.call("GET", "/info", doing="read its version", deadline=deadline))["version"]

    async def _post(self, endpoint, path, until, body, doing=None):
        server = endpoint.server
        await server.call("POST", path, doing=doing or until.doing, deadline=until.left(server), body=body)


class StubServer:
    """Samples the token that its one parameter names; runs in a thread."""

    def __init__(self):
        self.weights, self.received, self.version, self.failing = {"token": torch.tensor(3)}, {}, "default", ""
        self.port, self.paths = free_port(), []
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(30)

    def _serve(self, ready):
        async def start():
            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{path:.*}", self._answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            return runner

        runner = self._loop.run_until_complete(start())
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    def stop(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _answer(self, request):
        path, body = request.path, await request.json() if request.can_read_body else {}
        self.paths.append(path)
        if path == self.failing:
            return web.json_response({"message": "out of memory"}, status=500)
        if path == "/sample":
            tokens = [int(self.weights["token"])] * body["max_tokens"]
            completion = {"tokens": tokens, "logprobs": [-0.5] * len(tokens)}
            return web.json_response({"completions": [completion] * body["n"]})
        if path == "/weights/begin":
            self.received = {}
        elif path == "/weights/bucket":
            data = torch.frombuffer(bytearray(base64.b64decode(body["data"])), dtype=torch.uint8)
            self.received |= {name: tensor.clone() for name, tensor in unpack(body["manifest"], data)}
        elif path == "/weights/end":
            self.weights, self.version = self.received, body["version"]
        elif path == "/weights/folder":
            found = {}
            read_folder(Path(body["folder"]), found.update)
            self.weights, self.version = found, body["version"]
        elif path == "/version":
            self.version = body["version"]
        return web.json_response({"model": "stub", "version": self.version})


def update(token, version):
    named = [("filler", torch.zeros(300)), ("token", torch.tensor(token))]
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named)
    return WeightUpdate(version, specs, lambda: iter(named))


@pytest.fixture
def stub_engine():
    """Makes engines over stub servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def make(method="auto", servers=1):
            stubs = [StubServer() for _ in range(servers)]
            for stub in stubs:
                stack.callback(stub.stop)
            sender = WeightSender(StubWeightApi(), method, bucket_bytes=1000)
            clients = [ServerClient(stub.url) for stub in stubs]
            engine = RemoteEngine(clients, StubApi(), sender, ends=frozenset(), timeout=5.0, sync_timeout=20.0)
            stack.callback(engine.close)
            return engine, stubs

        yield make


def sampled(engine):
    request = SampleRequest([1, 2], 2, SamplingParams(max_tokens=3), [5, 6])
    return [(completion.token_ids, completion.versions) for completion in asyncio.run(engine.generate(request))]


@pytest.mark.parametrize("method", ["inline", "disk"])
def test_a_stub_backend_samples_with_the_weights_it_was_sent(stub_engine, method):
    engine, [stub] = stub_engine(method)
    assert sampled(engine) == [([3, 3, 3], None)] * 2
    for version, token in ((1, 7), (2, 9)):
        engine.load_weights(update(token, version))
        assert sampled(engine) == [([token] * 3, [version] * 3)] * 2
    # 1,200 bytes of filler exceed a bucket of 1,000, so the two tensors are two buckets.
    assert stub.paths.count("/weights/bucket") == (4 if method == "inline" else 0)


def test_a_stub_backend_has_failover(stub_engine):
    engine, [broken, healthy] = stub_engine(servers=2)
    broken.failing = "/weights/bucket"
    with pytest.warns(UserWarning, match=f"{broken.url}.*out of memory"):
        engine.load_weights(update(7, 1))
    assert engine.export_state()["urls"] == [healthy.url]
    assert sampled(engine) == [([7] * 3, [1] * 3)] * 2


def test_a_stub_backend_reports_the_failing_bucket(stub_engine):
    engine, [stub] = stub_engine()
    stub.failing = "/weights/bucket"
    with pytest.raises(ServerError, match=r"version 1 \(bucket 1 of 2: filler\): HTTP 500: out of memory"):
        engine.load_weights(update(7, 1))
