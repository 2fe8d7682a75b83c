"""A small server that speaks like vLLM's, with a real (tiny) model behind it, and that misbehaves on request.

It runs in a thread and answers over HTTP on 127.0.0.1. Tokens are sampled from the model and log-probs are the model's
own. Request bodies are checked strictly: an unknown name or a wrong type is an error 400 rather than ignored. Faults
are scripted per path:

    server = FakeVllm(tiny.model()).start()
    server.misbehave("/v1/completions", status(503, "overloaded"), times=2)     # the next two requests
    server.misbehave("/pause", hang())                                          # the next one
    server.kill()                                                               # as kill -9 does
    server.start()                                                              # again, with the first weights

As a program it serves until it is ended, prints every path that is asked for, and never answers one of them:

    python fake_vllm.py PORT PATH NUMBER                                        # from the NUMBERth request to PATH on
"""

import asyncio
import base64
import contextlib
import copy
import io
import json
import sys
import threading
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from PIL import Image
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[3]))  # it is also a program of its own

from covey.engines.servers.vllm.launch import BACKEND
from covey.engines.servers.weights.buckets import Receiver
from covey.engines.servers.weights.channels import boot_id, in_thread, join
from tests.support import tiny_vision

Fault = Callable[[web.Request, Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[web.StreamResponse]]

BODY: dict[str, Any] = {
    "model": str,
    "prompt": list,
    "n": int,
    "seed": int,
    "max_tokens": int,
    "temperature": (int, float),
    "top_k": int,
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "ignore_eos": bool,
    "skip_special_tokens": bool,
    "stop_token_ids": list,
    "logprobs": int,
    "return_token_ids": bool,
    "add_special_tokens": bool,
    "min_tokens": int,
    "structured_outputs": dict,
    "bad_words": list,
    "detokenize": bool,
    "prompt_logprobs": int,
}
"""What a completions request may hold; real vLLM ignores other names, which is just what must not happen here."""


# ---- faults ----------------------------------------------------------------------------------------------------------


def status(code: int, message: str) -> Fault:
    """An error answer in the shape of vLLM's."""

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "type": "Error", "code": code}}, status=code)

    return fault


def hang() -> Fault:
    """No answer, ever."""

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    return fault


def slow(seconds: float) -> Fault:
    """The right answer, late."""

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await handler(request)

    return fault


def drop() -> Fault:
    """The connection breaks before there is an answer."""

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        request.transport.abort()
        await asyncio.Event().wait()
        raise AssertionError

    return fault


def text(body: str | bytes, content_type: str = "application/json") -> Fault:
    """Another body with status 200."""

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        return web.Response(body=body.encode() if isinstance(body, str) else body, content_type=content_type)

    return fault


def cut_short(share: float = 0.5) -> Fault:
    """The first part of the right answer."""

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        whole = (await handler(request)).text
        return web.Response(text=whole[: int(len(whole) * share)], content_type="application/json")

    return fault


def edited(change: Callable[[dict[str, Any]], Any]) -> Fault:
    """The right answer after `change`, which edits it in place."""

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        answer = json.loads((await handler(request)).text)
        change(answer)
        return web.Response(text=json.dumps(answer), content_type="application/json")  # NaN is written as NaN

    return fault


def breaks_in_the_middle() -> Fault:
    """Half of the right answer, and then the connection breaks."""

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        whole = (await handler(request)).body
        answer = web.StreamResponse(headers={"Content-Length": str(len(whole)), "Content-Type": "application/json"})
        await answer.prepare(request)
        await answer.write(whole[: len(whole) // 2])
        request.transport.abort()
        return answer

    return fault


def dies(server: "FakeVllm") -> Fault:
    """The whole server ends at this request, as by kill -9."""

    async def fault(request: web.Request, handler: Any) -> web.StreamResponse:
        server.vanish()
        await asyncio.Event().wait()
        raise AssertionError

    return fault


def broken_off(tokens: int) -> Fault:
    """Completions end with `finish_reason="abort"` after so many tokens, as when the server is paused."""

    def change(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            choice["token_ids"] = choice["token_ids"][:tokens]
            choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:tokens]
            choice["finish_reason"] = "abort"

    return edited(change)


# ---- the server ------------------------------------------------------------------------------------------------------


def routed_by(model: Any, ids: list[int]) -> np.ndarray:
    """Experts [tokens, layers, k] of a forward pass, as the routers return them; 0 in layers without a router."""
    layers, found = model.model.layers, {}
    with contextlib.ExitStack() as hooks:
        for number, layer in enumerate(layers):
            for router in (getattr(layer.mlp, name, None) for name in ("gate", "router")):
                if router is not None:
                    hooks.enter_context(
                        router.register_forward_hook(lambda _, args, out, n=number: found.update({n: out[2]}))
                    )
        with torch.no_grad():
            model(torch.tensor([ids]))
    none = torch.zeros_like(next(iter(found.values())))
    return torch.stack([found.get(number, none) for number in range(len(layers))], dim=1).numpy()


class FakeVllm:
    """vLLM's HTTP surface, as far as training uses it.

    Attributes:
        requests: (path, body) of every request that was answered, in order.
        served: completions that were sampled to their end.
        flying: completions in flight.
        most: largest number of completions in flight at once.
        spoils: a bit of the weights that reach it is turned over.

    Args:
        model: what samples; copied.
        name: it is served under.
        release: of vLLM that it claims to be.
        dev_mode: whether it has the routes for training.
        logprobs_mode: as vLLM's option.
        api_key: that requests must bear.
        max_model_len: tokens of prompt and completion.
        token_delay: seconds a token takes.
        dtype: that it claims to compute in.
        buckets: whether it takes weights over a group, as one that `covey vllm-serve` started does.
        host: where it listens.
        processor: of a vision-language model, which makes it take images.
        routes: of a mixture of experts, it returns the experts of each token (`--enable-return-routed-experts`).
        tokenizer: for the texts of tokens in log-probs of prompts.
        max_logprobs: as vLLM's option.
        refuses: status of its answer to weights that do not fit its model.
        warm: whether log-probs of prompts are at the temperature of the request, as with Covey's worker extension.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str = "tiny",
        release: str = "0.32.0",
        dev_mode: bool = True,
        logprobs_mode: str = "raw_logprobs",
        api_key: str | None = None,
        max_model_len: int = 256,
        token_delay: float = 0.0,
        dtype: str = "torch.float32",
        in_pieces: bool = False,
        buckets: bool = False,
        host: str = "127.0.0.1",
        processor: Any = None,
        routes: bool = False,
        tokenizer: Any = None,
        max_logprobs: int = 20,
        warm: bool = False,
        refuses: int = 500,
    ):
        self.processor, self.routes = processor, routes
        self.tokenizer, self.max_logprobs, self.warm = tokenizer, max_logprobs, warm
        self._original = copy.deepcopy(model).eval()
        self.name, self.release, self.dev_mode = name, release, dev_mode
        self.logprobs_mode, self.api_key, self.max_model_len = logprobs_mode, api_key, max_model_len
        self.token_delay, self.dtype = token_delay, dtype
        self.in_pieces, self.refuses = in_pieces, refuses
        self.buckets, self.host = buckets, host
        self.port = 0
        self.requests: list[tuple[str, Any]] = []
        self.served = self.most = self.flying = self._pauses = 0
        self._faults: dict[str, deque[Fault]] = {}
        self._thread: threading.Thread | None = None
        self.spoils = False

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> "FakeVllm":
        """Listen, with the weights it was made with; again at the same port after `kill`."""
        self.model = copy.deepcopy(self._original)
        self.born, self._channel, self._incoming = uuid.uuid4().hex, None, {}
        self.receiver = Receiver()
        self.stamp, self.paused, self.sleeping, self.frozen = "default", False, False, False
        self._gone = False
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(30), "the fake server did not come up"
        return self

    def kill(self) -> None:
        """Vanish: connections break, nothing is finished."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.vanish)
            self._thread.join(30)
            self._thread = None

    def __enter__(self) -> "FakeVllm":
        return self.start()

    def __exit__(self, *error: Any) -> None:
        self.kill()

    def misbehave(self, path: str, fault: Fault, times: int = 1) -> None:
        """Have the next `times` requests to `path` go wrong."""
        self._faults.setdefault(path, deque()).extend([fault] * times)

    def freeze(self) -> None:
        """Accept requests and answer none, as a stopped process does."""
        self.frozen = True

    def misbehaves(self) -> bool:
        """Tell whether faults are still to come."""
        return any(self._faults.values())

    def mend(self) -> None:
        """Drop all faults that are still to come."""
        self._faults.clear()

    def asked(self, path: str) -> list[Any]:
        """Bodies of the requests to `path`."""
        return [body for requested, body in self.requests if requested == path]

    # ---- running -----------------------------------------------------------------------------------------------

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._resumed = asyncio.Event()
        self._resumed.set()
        app = web.Application(middlewares=[self._guard], client_max_size=2**30)
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app, shutdown_timeout=0.0, handle_signals=False, access_log=None, handler_cancellation=True
        )
        self._loop.run_until_complete(self._listen())
        ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(asyncio.wait_for(self._runner.cleanup(), 5))
        self._loop.close()

    async def _listen(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def vanish(self) -> None:
        """`kill` from within; it can be started again after `kill`."""
        if self._gone:  # a second stop would end the clean-up of the first, which frees the port
            return
        self._gone, self._channel = True, None
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self._loop.stop()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.frozen:
            await asyncio.Event().wait()
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.can_read_body:
            self.requests.append((request.path, await request.json()))
        else:
            self.requests.append((request.path, dict(request.query)))
        faults = self._faults.get(request.path)
        if faults:
            return await faults.popleft()(request, handler)
        return await handler(request)

    def _routes(self) -> list[web.RouteDef]:
        plain = [
            web.get("/health", self._health),
            web.get("/version", self._version),
            web.get("/v1/models", self._models),
            web.get("/openapi.json", self._openapi),
            web.post("/v1/completions", self._completions),
            *([web.post("/inference/v1/generate", self._with_images)] if self.processor is not None else []),
        ]
        training = [
            web.get("/get_world_size", self._world_size),
            web.get("/server_info", self._server_info),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.get("/is_paused", self._is_paused),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/is_sleeping", self._is_sleeping),
            web.post("/collective_rpc", self._collective_rpc),
        ]
        training += [
            web.post("/init_weight_transfer_engine", self._meet),
            web.post("/start_weight_update", self._start_update),
            web.post("/update_weights", self._take_bucket),
            web.post("/finish_weight_update", self._finish_update),
            web.get("/weight_info", self._weight_info),
            web.post("/update_weight_version", self._stamp),
        ]
        return plain + (training if self.dev_mode else [])

    # ---- what it is ------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.release})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.name, "root": f"/models/{self.name}", "parent": None, "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _openapi(self, request: web.Request) -> web.Response:
        schema = {"CompletionRequest": {"properties": {name: {} for name in BODY}}}
        return web.json_response({"components": {"schemas": schema}})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _server_info(self, request: web.Request) -> web.Response:
        assert request.query["config_format"] == "json"
        config = {
            "model_config": {
                "dtype": self.dtype,
                "enable_sleep_mode": True,
                "enable_return_routed_experts": self.routes,
            },
            "weight_transfer_config": None,
            "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": self.in_pieces},
        }
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        if problem := self._problem(body):
            return _refusal(problem)
        if "prompt_logprobs" in body:
            return await self._scored(body)
        count = body.get("n", 1)
        self.flying += count
        self.most = max(self.most, self.flying)
        try:
            await self._resumed.wait()
            rows = await asyncio.gather(*(self._sample(body, index) for index in range(count)))
        finally:
            self.flying -= count
        choices = [
            {
                "index": index,
                "text": "",
                "logprobs": {"token_logprobs": logprobs},
                "finish_reason": finish,
                "token_ids": tokens,
                "prompt_token_ids": body["prompt"],
                "routed_experts": self._routed(body["prompt"] + tokens[:-1]) if self.routes and tokens else None,
            }
            for index, (tokens, logprobs, finish) in enumerate(rows)
        ]
        self.served += sum(finish != "abort" for _, _, finish in rows)
        return web.json_response({"id": "cmpl", "object": "text_completion", "model": self.name, "choices": choices})

    def _routed(self, ids: list[int]) -> str:
        """A NumPy file in base64 with the experts [tokens, layers, k] of these tokens."""
        file = io.BytesIO()
        np.save(file, routed_by(self.model, ids).astype(np.uint8))
        return base64.b64encode(file.getvalue()).decode()

    async def _scored(self, body: dict[str, Any]) -> web.Response:
        """Log-probs of the prompt's tokens, by themselves and of the likeliest at each position."""
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            await asyncio.sleep(self.token_delay)
        finally:
            self.flying -= 1
        prompt, top = body["prompt"], body["prompt_logprobs"]
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt])).logits[0, :-1].float()
        logprobs = (logits / (body["temperature"] if self.warm else 1.0)).log_softmax(-1)
        places: list[Any] = [None]
        for token, row in zip(prompt[1:], logprobs, strict=True):
            likeliest = row.topk(top).indices.tolist()
            places.append(
                {
                    str(one): {
                        "logprob": max(float(row[one]), -9999.0),
                        "rank": int((row > row[one]).sum()) + 1,
                        "decoded_token": None if self.tokenizer is None else self.tokenizer.decode([one]),
                    }
                    for one in [token, *likeliest]
                }
            )
        self.served += 1
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "prompt_logprobs": places}
        return web.json_response({"id": "cmpl", "object": "text_completion", "model": self.name, "choices": [choice]})

    async def _with_images(self, request: web.Request) -> web.Response:
        """Tokens and images in, tokens out; the prompt is expanded with the model's own processor."""
        body = await request.json()
        body |= body.pop("sampling_params")
        urls = [part["url"] for part in body.pop("content_parts") if part["type"] == "image_url"]
        images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
        text = self.processor.tokenizer.decode(body.pop("token_ids"))
        inputs = dict(self.processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False))
        inputs.pop("attention_mask")
        body["prompt"] = inputs.pop("input_ids")[0].tolist()
        if (problem := self._problem(body)) or body.pop("detokenize"):
            return _refusal(problem or "text was asked for")
        await self._resumed.wait()
        rows = await asyncio.gather(*(self._sample(body, index, inputs) for index in range(body["n"])))
        choices = [
            {
                "index": index,
                "logprobs": {
                    "content": [{"token_id": t, "logprob": one} for t, one in zip(tokens, logprobs, strict=True)]
                },
                "finish_reason": finish,
                "token_ids": tokens,
            }
            for index, (tokens, logprobs, finish) in enumerate(rows)
        ]
        self.served += len(rows)
        return web.json_response({"request_id": "g", "choices": choices, "prompt_token_ids": body["prompt"]})

    def _problem(self, body: dict[str, Any]) -> str | None:
        for name, value in body.items():
            if name not in BODY:
                return f"{name} is not known here"
            if not isinstance(value, BODY[name]) or (isinstance(value, bool) and BODY[name] is not bool):
                return f"{name}={value!r} has the wrong type"
        if body.get("model") not in (None, self.name):
            return f"The model `{body['model']}` does not exist."
        vocabulary = self.model.config.get_text_config().vocab_size
        if strange := [token for token in body["prompt"] if not 0 <= token < vocabulary]:
            return f"Token id {strange[0]} is out of vocabulary"
        if not body["prompt"] or body["max_tokens"] < 1 or body.get("n", 1) < 1:
            return "prompt, max_tokens and n must be positive"
        if len(body["prompt"]) + body["max_tokens"] > self.max_model_len:
            return f"This model's maximum context length is {self.max_model_len} tokens."
        if "prompt_logprobs" in body:
            most = f", which is greater than max allowed: {self.max_logprobs}"
            asked = f"Requested prompt logprobs of {body['prompt_logprobs']}"
            return asked + most if body["prompt_logprobs"] > self.max_logprobs else None
        if body.get("return_token_ids") is not True or body.get("logprobs") is None:
            return "training needs return_token_ids and logprobs"
        return None

    async def _sample(
        self, body: dict[str, Any], index: int, images: dict[str, Any] | None = None
    ) -> tuple[list[int], list[float], str]:
        """One completion, a token at a time, so that a pause can break it off."""
        generator = torch.Generator().manual_seed((body.get("seed", 0) + index) % 2**63)
        begun = self._pauses
        tokens: list[int] = []
        logprobs: list[float] = []
        ends = set(body.get("stop_token_ids", [])) | (set() if body.get("ignore_eos") else {1})
        while len(tokens) < body["max_tokens"]:
            await asyncio.sleep(self.token_delay)
            if self._pauses != begun:
                return tokens, logprobs, "abort"
            with torch.no_grad():
                ids = torch.tensor([body["prompt"] + tokens])
                logits = self.model(ids, **tiny_vision.extended(images or {}, ids)).logits[0, -1].float()
            temperature = body["temperature"]
            cut = _cut(logits / (temperature or 1.0), body)
            token = int(
                cut.argmax() if temperature == 0 else torch.multinomial(cut.softmax(-1), 1, generator=generator)
            )
            reported = cut if self.logprobs_mode == "processed_logprobs" else logits
            if "logits" not in self.logprobs_mode:
                reported = reported.log_softmax(-1)
            tokens.append(token)
            logprobs.append(float(reported[token]))
            if token in ends:
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"

    # ---- training --------------------------------------------------------------------------------------------------

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "abort"
        self.paused = True
        self._pauses += 1
        self._resumed.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.paused = False
        self._resumed.set()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.sleeping = True
        return web.json_response({"status": "sleeping", "level": int(request.query["level"])})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self.sleeping = False
        return web.json_response({"status": "awake", "tags": None})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.sleeping})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.stamp})

    async def _stamp(self, request: web.Request) -> web.Response:
        self.stamp = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.stamp})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        """`reload_weights` from a folder of safetensors, as vLLM's workers do; every tensor must fit."""
        body = await request.json()
        if self.buckets and body.get("method") == "covey_facts":
            facts = {"backend": BACKEND, "device": "cpu", "gpu": None, "boot": boot_id(), "max_lora_rank": None}
            return web.json_response({"results": [{**facts, "born": self.born, "differences": True}]})
        if body.get("method") != "reload_weights":
            return _refusal(f"no method {body.get('method')!r}")
        found: dict[str, Any] = {}
        for path in sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors")):
            found.update(load_file(path))
        return self._load(found) or web.json_response({"results": [None]})

    def _load(self, found: dict[str, Any]) -> web.Response | None:
        """Put a whole model's tensors in place, or say what does not fit."""
        expected = tiny_vision.by_checkpoint_name(self.model)  # tied weights once
        if found.keys() != expected.keys():
            return _refusal(f"weights do not fit: {sorted(found.keys() ^ expected.keys())[:3]}", self.refuses)
        with torch.no_grad():
            for name, parameter in expected.items():
                if parameter.shape != found[name].shape:
                    return _refusal(f"{name} has shape {list(found[name].shape)}", self.refuses)
                parameter.copy_(found[name])
        return None

    # ---- weights over a group, with the server's end of the real channels ----------------------------------------

    async def _meet(self, request: web.Request) -> web.Response:
        where = (await request.json())["init_info"]
        names = ("channel", "address", "port", "name")
        try:
            given = [*(where[name] for name in names), 1, where["world_size"], where["seconds"]]
            self._channel = await in_thread(lambda: join(*given))
        except RuntimeError as error:
            return _refusal(str(error).partition("\n")[0], 500)
        return web.json_response({"message": "ok"})

    async def _start_update(self, request: web.Request) -> web.Response:
        self._incoming = {}
        return web.json_response({"message": "ok"})

    async def _take_bucket(self, request: web.Request) -> web.Response:
        piece, channel = (await request.json())["update_info"], self._channel
        assert channel is not None, "a trainer connects first"
        size, seconds = int(piece["manifest"]["nbytes"]), piece["seconds"]
        try:
            data = await in_thread(lambda: channel.receive(size, torch.device("cpu"), seconds))
            if self.spoils:
                data[0] ^= 1
            taken = self.receiver.take(piece["manifest"], data, piece["number"])
            self._incoming |= {name: tensor.clone() for name, tensor in taken}
            if piece["number"] + 1 == piece["count"]:
                self.receiver.finish()
        except (ValueError, RuntimeError) as error:
            return _refusal(str(error), 500)
        return web.json_response({"message": "ok"})

    async def _finish_update(self, request: web.Request) -> web.Response:
        self.stamp = (await request.json()).get("weight_version", self.stamp)
        return (self._incoming and self._load(self._incoming)) or web.json_response({"message": "ok"})


def main(port: int, path: str, number: int) -> None:
    """Serve in a process of its own."""
    from time import sleep

    from tests.support import tiny

    server = FakeVllm(tiny.model(), buckets=True)

    async def usual(request: web.Request, handler: Any) -> web.StreamResponse:
        return await handler(request)

    server.port = port
    server.misbehave(path, usual, number - 1)
    server.misbehave(path, hang(), 99)
    server.start()
    printed = 0
    while True:
        sleep(0.05)
        for asked, _ in server.requests[printed:]:
            printed += 1
            print(asked, flush=True)


def _refusal(message: str, code: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": code}}, status=code)


def _cut(logits: torch.Tensor, body: dict[str, Any]) -> torch.Tensor:
    """Logits [V] after top-k and top-p."""
    top_k, top_p = body.get("top_k", 0), body.get("top_p", 1.0)
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, len(logits))).values[-1], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        drop = (probs.cumsum(-1) - probs >= top_p).scatter(0, order, probs.cumsum(-1) - probs >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
