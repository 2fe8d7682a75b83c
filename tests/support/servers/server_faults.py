"""Faults of an inference server and their outcomes: the rows of the table in benchmarks/server-faults.md.

To add a fault, append it to `FAULTS`, and a row with the same `what` to the table.
"""

import http.server
import math
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web
from transformers import TrainerCallback

from covey.engines.servers.errors import (
    BadAnswer,
    DeadlineExceeded,
    NoServerLeft,
    ServerBusy,
    ServerError,
    ServerRefused,
)
from tests.support import runs, tiny
from tests.support.launching import free_port
from tests.support.servers import fake_vllm
from tests.support.servers.fake_vllm import FakeVllm
from tests.support.servers.sglang_servers import InThread

CONFIG = "The config is refused"
START = "The run does not begin"
ENDS = "The run ends"
CONTINUES = "The run continues"
WARNS = "A warning"

ANSWER, WEIGHTS = "/v1/completions", "/update_weights"
FOLDER = "/update_weights_from_disk"

SHORT: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_timeout": 2.0,
    "vllm_server_request_timeout": 30.0,
    "vllm_server_sync_timeout": 30.0,
    "vllm_group_port": 0,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 4,
    "max_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
}
"""Settings of these runs: two steps of one group each."""

SGLANG: dict[str, Any] = {
    **{name: value for name, value in SHORT.items() if "vllm" not in name},
    "use_sglang": True,
    "sglang_server_timeout": 2.0,
    "sglang_request_timeout": 30.0,
    "sglang_sync_timeout": 30.0,
    "sglang_weight_transfer": "disk",
}
"""The same with SGLang."""


class Scene:
    """Servers and trainers of one test, all of which end with it.

    Attributes:
        path: an empty folder.
        servers: in the order in which they were started.

    Args:
        sglang: servers are SGLang's, rather than vLLM's.
    """

    def __init__(self, path: Path, sglang: bool = False):
        self.path, self.sglang = path, sglang
        self.servers: list[Any] = []
        self.ending = ExitStack()

    def serve(self, **options: Any) -> Any:
        if self.sglang:
            folder = tiny.folder(self.path / f"model{len(self.servers)}", **options.pop("changes", {}))
            self.servers.append(InThread(str(folder), *options.get("flags", ())))
            self.ending.callback(self.servers[-1].stop)
            return self.servers[-1]
        made = FakeVllm(options.pop("model", None) or tiny.model(), **options).start()
        self.ending.callback(made.kill)
        self.servers.append(made)
        return made

    def trainer(self, urls: Any, *, parts: dict[str, Any] | None = None, **settings: Any) -> Any:
        given = {**SGLANG, "sglang_base_url": urls} if self.sglang else {**SHORT, "vllm_server_base_url": urls}
        made = runs.trainer(self.path / "run", parts=parts, **{**given, **settings})
        self.ending.callback(made.collector.engine.close)
        return made


class BetweenSteps(TrainerCallback):
    """Lets one fault happen after each step; those before it must have passed."""

    def __init__(self, scene: Scene, faults: list[Callable[[Scene], None]]):
        self.scene, self.faults = scene, faults

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step <= len(self.faults):
            if state.global_step > 1:
                assert not any(server.misbehaves() for server in self.scene.servers), "it went wrong as it should"
            self.faults[state.global_step - 1](self.scene)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        what: the row of the table. Several may share one.
        outcome: what happens, as the row begins.
        says: patterns that the message contains; the server's address is looked for by itself.
        kind: class of the error or the warning.
        server: options that servers are started with.
        settings: of the run; functions are called when it is made.
        before: goes wrong before the trainer is made; may return the address that the run is given.
        during: goes wrong between the first step and the second.
        servers: how many there are.
        sglang: it happens to SGLang's servers, not to vLLM's.
        model: what is trained; None: the model that the server was started with.
    """

    what: str
    outcome: str
    says: tuple[str, ...] = ()
    kind: type[Exception] = ServerRefused
    server: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Scene], Any] | None = None
    during: Callable[[Scene], None] | None = None
    servers: int = 1
    model: Callable[[], Any] | None = None
    sglang: bool = False

    def given(self) -> dict[str, Any]:
        """Settings of the run, as values."""
        return {name: value() if callable(value) else value for name, value in self.settings.items()}

    def meet(self, scene: Scene, others: "tuple[Fault, ...]" = ()) -> Any:
        """Let it happen, and after each further step one of the others; returns the trainer."""
        for _ in range(self.servers):
            scene.serve(**self.server)
        urls = (self.before and self.before(scene)) or [server.url for server in scene.servers]
        during = [fault.during for fault in (self, *others) if fault.during]
        parts = {"callbacks": [BetweenSteps(scene, during)], **({"model": self.model()} if self.model else {})}
        made = scene.trainer(urls, parts=parts, max_steps=2 + len(others), **self.given())
        made.train()
        return made


# ---- things that go wrong ------------------------------------------------------------------------------------------


def wrong(path: str, fault: fake_vllm.Fault, times: int = 1) -> Callable[[Scene], None]:
    """Requests to the first server go wrong."""
    return lambda scene: scene.servers[0].misbehave(path, fault, times)


def edit(change: Callable[[dict[str, Any]], Any]) -> fake_vllm.Fault:
    """The first completion of an answer is changed."""
    return fake_vllm.edited(lambda answer: change(answer["choices"][0]))


def logprobs(change: Callable[[list[float]], Any]) -> fake_vllm.Fault:
    return edit(lambda choice: change(choice["logprobs"]["token_logprobs"]))


NAN = logprobs(lambda numbers: numbers.__setitem__(0, math.nan))


def failing(path: str, **how: Any) -> Callable[[Scene], None]:
    """Requests to the first of SGLang's servers go wrong."""
    return lambda scene: scene.servers[0].fail(path, **how)


def nobody(scene: Scene) -> Any:
    if scene.sglang:
        return f"http://127.0.0.1:{free_port()}"
    return scene.servers[0].kill()


def silent(scene: Scene) -> str:
    """Something that takes connections and never answers."""
    listening = scene.ending.enter_context(socket.socket())
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def web_server(scene: Scene) -> str:
    """Another program: a server of files."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    scene.ending.callback(server.server_close)
    scene.ending.callback(server.shutdown)
    return f"http://127.0.0.1:{server.server_port}"


def sends_on(scene: Scene) -> None:
    async def elsewhere(request: web.Request, handler: Any) -> web.Response:
        return web.Response(status=308, headers={"Location": "https://login.example/"})

    scene.servers[0].misbehave("/health", elsewhere)


def killed_for_good(scene: Scene) -> None:
    scene.servers[0].misbehave(ANSWER, fake_vllm.dies(scene.servers[0]))


def comes_back(path: str) -> Callable[[Scene], None]:
    """The server dies at a request, and is there again a second later, with the weights it was started with."""

    def plan(scene: Scene) -> None:
        server = scene.servers[0]

        def again() -> None:
            server.kill()
            server.start()

        async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
            timer = threading.Timer(0.7, again)
            timer.start()
            scene.ending.callback(timer.join)
            return await fake_vllm.dies(server)(request, handler)

        server.misbehave(path, fault)

    return plan


def restarted(scene: Scene) -> None:
    scene.servers[0].kill()
    scene.servers[0].start()


def other_run(scene: Scene) -> None:
    """Another run sends its weights while this one samples."""
    server = scene.servers[0]

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        server.stamp = "covey-0a1b2c3d-1"
        return await handler(request)

    server.misbehave(ANSWER, fault)


@cache
def group_port() -> int:
    """Chosen when it is first needed: another program could take it while the tests before run."""
    return free_port()


def port_taken(scene: Scene) -> None:
    taken = scene.ending.enter_context(socket.socket())
    taken.bind(("127.0.0.1", group_port()))
    taken.listen()


def spoil(scene: Scene) -> None:
    scene.servers[0].spoils = True


def no_folder(scene: Scene) -> None:
    Path("in the way").write_text("a file")


def adapter() -> Any:
    import peft

    return peft.get_peft_model(tiny.model(), peft.LoraConfig(r=2, target_modules=["q_proj"]))


FAULTS = [
    # addresses
    Fault("an address without http://", CONFIG, (r"'localhost:8000'", r"http://HOST:PORT"), ValueError,
          before=lambda scene: "localhost:8000"),
    Fault("an address with a path", CONFIG, (r"'http://a:8000/v1'", r"without a path"), ValueError,
          before=lambda scene: "http://a:8000/v1"),
    Fault("one server named twice", CONFIG, (r"names http://a:8000 twice",), ValueError,
          before=lambda scene: ["http://a:8000", "http://a:8000/"]),
    Fault("nobody listens at the address", START, (r"within 2 seconds", r"Connect call failed"), NoServerLeft,
          before=nobody),
    Fault("the address takes connections and never answers", START, (r"no answer within", "vllm_server_timeout"),
          NoServerLeft, before=silent),
    Fault("another program answers there", START, (r"HTTP 404", r"Is it the right server"), before=web_server),
    Fault("https:// to a server without TLS", START, (r"ssl", r"Write http:// if it speaks no TLS"),
          before=lambda scene: scene.servers[0].url.replace("http", "https")),
    Fault("the address sends requests on to another one", START, (r"HTTP 308", r"https://login\.example/"),
          before=sends_on),
    # what was started there
    Fault("the key is missing", START, (r"HTTP 401", r"Give the server's API key"), server={"api_key": "k"}),
    Fault("the key is wrong", START, (r"HTTP 401", r"check the one you gave"), server={"api_key": "k"},
          settings={"vllm_server_api_key": "wrong"}),
    Fault("the server's vLLM is too old", START, (r"0\.9\.1", r"pip install -U vllm"), server={"release": "0.9.1"}),
    Fault("the routes for training are missing", START, (r"VLLM_SERVER_DEV_MODE=1",), server={"dev_mode": False}),
    Fault("the server's model has another vocabulary", START, (r"lacks token 103", r"model that is trained"),
          server={"model": tiny.model(vocab_size=80)}),
    Fault("the server's model has another architecture", START,
          (r"weights of version 0", r"HTTP 500: weights do not fit: \['model\.layers\.1", r"server's log"), ServerError,
          server={"model": tiny.model(num_hidden_layers=1), "buckets": True}),
    Fault("the server reports log-probs from before the temperature", START,
          (r"temperature 0\.7", r"--logprobs-mode processed_logprobs"), settings={"temperature": 0.7}),
    Fault("the server reports logits", START, (r"it reports logits", r"--logprobs-mode raw_logprobs"),
          server={"logprobs_mode": "raw_logits"}),
    Fault("generation_kwargs that the server does not know", START, (r"'min_token'", r"but 'min_tokens'"),
          settings={"generation_kwargs": {"min_token": 1}}),
    Fault("generation_kwargs that requests decide themselves", START, (r"leave out stream",), ValueError,
          settings={"generation_kwargs": {"stream": True}}),
    Fault("the server takes no adapters", START, (r"vllm_lora_sync='adapter'", r"adapters enabled"), ValueError,
          settings={"vllm_lora_sync": "adapter"}, model=adapter),
    Fault("the server's context is shorter than the model's", WARNS, (r"64 tokens and the model to 256",
          r"--max-model-len"), UserWarning, server={"max_model_len": 64}),
    # failures that pass
    Fault("it answers 503 or 429 for a while", CONTINUES, during=wrong(ANSWER, fake_vllm.status(503, "loading"), 2)),
    Fault("it answers 503 or 429 for a while", CONTINUES, during=wrong(ANSWER, fake_vllm.status(429, "too many"))),
    Fault("it fails at a request, for lack of memory for instance", CONTINUES,
          during=wrong(ANSWER, fake_vllm.status(500, "CUDA out of memory"))),
    Fault("the connection breaks before the answer or in the middle of it", CONTINUES,
          during=wrong(ANSWER, fake_vllm.drop())),
    Fault("the connection breaks before the answer or in the middle of it", CONTINUES,
          during=wrong(ANSWER, fake_vllm.breaks_in_the_middle())),
    Fault("its answer is not JSON, or half of it", CONTINUES,
          during=wrong(ANSWER, fake_vllm.text("<html>busy</html>"))),
    Fault("its answer is not JSON, or half of it", CONTINUES, during=wrong(ANSWER, fake_vllm.cut_short())),
    Fault("completions are missing in its answer", CONTINUES,
          during=wrong(ANSWER, fake_vllm.edited(lambda answer: answer["choices"].clear()))),
    Fault("completions are missing in its answer", CONTINUES,
          during=wrong(ANSWER, fake_vllm.edited(lambda answer: answer["choices"].pop()))),
    Fault("log-probs are missing, too many, or NaN", CONTINUES, during=wrong(ANSWER, logprobs(lambda n: n.pop()))),
    Fault("log-probs are missing, too many, or NaN", CONTINUES,
          during=wrong(ANSWER, logprobs(lambda n: n.append(-1.0)))),
    Fault("log-probs are missing, too many, or NaN", CONTINUES,
          during=wrong(ANSWER, edit(lambda choice: choice.update(logprobs=None)))),
    Fault("log-probs are missing, too many, or NaN", CONTINUES, during=wrong(ANSWER, NAN)),
    Fault("one request hangs", CONTINUES, settings={"vllm_server_request_timeout": 1.5},
          during=wrong(ANSWER, fake_vllm.hang())),
    Fault("one of two servers is killed while it samples", CONTINUES, servers=2, during=killed_for_good),
    Fault("the only server is killed and started again", CONTINUES, settings={"vllm_server_timeout": 20.0},
          during=comes_back(ANSWER)),
    Fault("a server was restarted between two steps", CONTINUES, settings={"vllm_server_timeout": 20.0},
          during=restarted),
    Fault("one of two servers is killed while it takes weights", CONTINUES, servers=2, server={"buckets": True},
          during=lambda scene: scene.servers[0].misbehave(WEIGHTS, fake_vllm.dies(scene.servers[0]))),
    Fault("one of two servers fails whenever it is sent weights", CONTINUES, servers=2, server={"buckets": True},
          during=wrong(WEIGHTS, fake_vllm.status(500, "cannot allocate memory"), 3)),
    Fault("the only server is killed while it takes weights, and started again", CONTINUES, server={"buckets": True},
          settings={"vllm_server_timeout": 20.0}, during=comes_back(WEIGHTS)),
    Fault("it fails once at taking weights", CONTINUES, server={"buckets": True},
          during=wrong(WEIGHTS, fake_vllm.status(500, "cannot allocate memory"))),
    # failures that stay
    Fault("it is out of memory at every request", ENDS, (r"cannot generate: HTTP 500: CUDA out of memory",),
          ServerError, during=wrong(ANSWER, fake_vllm.status(500, "CUDA out of memory"), 9)),
    Fault("it says that it is busy, and stays so", ENDS, (r"HTTP 429: queue is full",), ServerBusy,
          during=wrong(ANSWER, fake_vllm.status(429, "queue is full"), 99)),
    Fault("it is slower than the deadline", ENDS, (r"no answer within 0\.7 seconds",
          r"Raise vllm_server_request_timeout"),
          DeadlineExceeded, settings={"vllm_server_request_timeout": 0.7},
          during=lambda scene: setattr(scene.servers[0], "token_delay", 9.0)),
    Fault("the only server is killed, and stays away", ENDS, (r"none of 1", r"last checkpoint", r"broke off|Connect"),
          NoServerLeft, during=killed_for_good),
    Fault("log-probs are NaN in every answer", ENDS, (r"1 of \d log-probs.*\(nan\)", r"bfloat16"), BadAnswer,
          during=wrong(ANSWER, NAN, 9)),
    Fault("log-probs are missing in every answer", ENDS, (r"no log-probs for \d tokens",), BadAnswer,
          during=wrong(ANSWER, edit(lambda choice: choice.update(logprobs=None)), 9)),
    Fault("a completion holds a token that the trained model lacks", ENDS, (r"it sampled token 5000", r"ends at 104"),
          during=wrong(ANSWER, edit(lambda choice: choice["token_ids"].__setitem__(0, 5000)))),
    Fault("another run sends weights to the same server", ENDS, (r"another run", r"covey-0a1b2c3d-1", "servers of its"),
          during=other_run),
    # weights
    Fault("it refuses the weights", ENDS, (r"weights of version 1 \(bucket 1 of 1: .*\)", r"HTTP 500: bad shard"),
          ServerError, server={"buckets": True}, settings={"vllm_group_port": group_port},
          during=wrong(WEIGHTS, fake_vllm.status(500, "bad shard"), 9)),
    Fault("weights are changed on their way", ENDS, (r"version 1", r"changed on its way: its checksum is"), ServerError,
          server={"buckets": True}, during=spoil),
    Fault("taking weights hangs", ENDS, (r"version 1", r"(within|longer than) \d+(\.\d+)? seconds"),
          DeadlineExceeded, server={"buckets": True}, settings={"vllm_server_sync_timeout": 2.0},
          during=wrong(WEIGHTS, fake_vllm.hang(), 9)),
    Fault("the server cannot reach vllm_group_port", START, (r"join a gloo group", r"(within|longer than) \d+"),
          DeadlineExceeded, server={"buckets": True}, settings={"vllm_server_sync_timeout": 2.0},
          before=wrong("/init_weight_transfer_engine", fake_vllm.hang(), 9)),
    Fault("vllm_group_port is taken", START, (r"port \d+", r"in use", r"vllm_group_port"),
          server={"buckets": True}, settings={"vllm_group_port": group_port}, before=port_taken),
    Fault("weights as files for a server on another machine, without a shared folder", START,
          (r"on another machine", r"vllm_weight_folder"), server={"host": "127.0.0.2"}),
    Fault("the folder for weights cannot be written to, or the disk is full", START,
          (r"cannot be written to .*in the way", r"Make room there"), RuntimeError,
          settings={"vllm_weight_folder": "in the way"}, before=no_folder),
    # SGLang
    Fault("SGLang: nobody listens at the address", START,
          (r"within 2 seconds", r"sglang_server_timeout", r"Connect call failed"),
          NoServerLeft, sglang=True, before=nobody),
    Fault("SGLang: another program answers there", START, (r"HTTP 404",), sglang=True, before=web_server),
    Fault("SGLang: the key is missing, or wrong", START, (r"HTTP 401", r"Give the server's API key"), sglang=True,
          server={"flags": ("--api-key", "k")}),
    Fault("SGLang: the server's model has another vocabulary", START, (r"lacks token 103", r"model that is trained"),
          sglang=True, server={"changes": {"vocab_size": 80}}),
    Fault("SGLang: it is busy for a while", CONTINUES, sglang=True,
          during=failing("/generate", status=503, text="loading", times=2)),
    Fault("SGLang: its answer is not JSON", CONTINUES, sglang=True,
          during=failing("/generate", status=200, text="<html>", times=1)),
    Fault("SGLang: one request hangs", CONTINUES, sglang=True, settings={"sglang_request_timeout": 1.5},
          during=failing("/generate", status=200, text="", hang=60, times=1)),
    Fault("SGLang: it fails once at taking weights", CONTINUES, sglang=True,
          during=failing(FOLDER, status=500, text="cannot allocate memory", times=1)),
    Fault("SGLang: it is out of memory at every request", ENDS, (r"HTTP 500: CUDA out of memory",), ServerError,
          sglang=True, during=failing("/generate", status=500, text="CUDA out of memory", times=9)),
    Fault("SGLang: it is slower than the deadline", ENDS,
          (r"no answer within 0\.7 seconds", r"Raise sglang_request_timeout"),
          DeadlineExceeded, sglang=True, settings={"sglang_request_timeout": 0.7},
          during=failing("/generate", status=200, text="", hang=60, times=9)),
    Fault("SGLang: it refuses the weights", ENDS, (r"version 1", r"HTTP 400: bad shard"), sglang=True,
          during=failing(FOLDER, status=400, text='{"success": false, "message": "bad shard"}', times=9)),
    Fault("SGLang: taking weights hangs", ENDS,
          (r"version 1", r"(within|longer than) \d+(\.\d+)? seconds", r"Raise sglang_sync_timeout"),
          DeadlineExceeded, sglang=True, settings={"sglang_sync_timeout": 2.0},
          during=failing(FOLDER, status=200, text="", hang=60, times=9)),
]  # fmt: skip
