"""A small HTTP server that behaves as SGLang does, for tests where SGLang itself cannot run.

Real in it: the checks of every request (field names and types as `sglang_record.json` has them from SGLang's own
classes, and stricter: unknown fields are refused), the weights (whatever is sent is loaded into a transformers model,
where a wrong name, shape or number fails), and the samples, which come from that model. Not in it: speed.

Routes that begin with /_ are the tests' own: /_fail makes the next requests of a path fail, /_log tells what was asked.
"""

import argparse
import asyncio
import base64
import copy
import functools
import hashlib
import io
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from aiohttp import web
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[3]))  # it is also a program of its own

from covey.policy.loading import load_policy
from tests.support import tiny_vision
from tests.support.servers.fake_vllm import routed_by

RECORD = json.loads(Path(__file__).with_name("sglang_record.json").read_text())
TAGS = {"kv_cache", "weights", "cuda_graph"}


class Refused(Exception):
    """Becomes HTTP 400 with `success` and `message`."""


# ---- what requests may look like -------------------------------------------------------------------------------------


def check_fields(body: Any, fields: dict[str, Any], what: str) -> None:
    """Refuse a body with unknown, missing or wrongly typed fields."""
    if not isinstance(body, dict):
        raise Refused(f"{what}: an object belongs here, got {body!r:.100}")
    unknown = sorted(set(body) - set(fields))
    missing = sorted(name for name, field in fields.items() if field["required"] and name not in body)
    if unknown or missing:
        raise Refused(f"{what}: unknown fields {unknown}, missing fields {missing}")
    for name, value in body.items():
        if not fits(value, fields[name]["type"]):
            raise Refused(f"{what}: {name}={value!r:.100} is no {fields[name]['type']}")


def fits(value: Any, kind: Any) -> bool:
    """Tell whether a JSON value is of a recorded type."""
    if isinstance(kind, dict):
        ((form, inner),) = kind.items()
        if form == "any of":
            return any(fits(value, one) for one in inner)
        if form == "one of":
            return value in inner
        if form == "list":
            return isinstance(value, list) and all(fits(one, inner) for one in value)
        return isinstance(value, dict) and all(fits(one, inner) for one in value.values())
    if kind == "base64":
        return isinstance(value, str) and bool(base64.b64decode(value, validate=True))
    if kind == "int":
        return type(value) is int and -(2**63) <= value < 2**63
    if kind == "float":
        return type(value) in (int, float)
    return kind == "any" or type(value) is {"str": str, "bool": bool, "null": type(None)}[kind]


class AllowedUnpickler(pickle.Unpickler):
    """Rebuilds what SGLang's own unpickler would, and refuses the rest."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if [module, name] not in RECORD["allowed_globals"]:
            raise Refused(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return super().find_class(module, name)


# ---- the model -------------------------------------------------------------------------------------------------------


class Weights:
    """The model and its adapters."""

    def __init__(self, path: str):
        self.model: Any = load_policy(path).eval()  # of whatever kind it is
        self.adapters: dict[str, Any] = {}
        self.loaded: set[str] = set()
        self.groups: dict[str, Any] = {}

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        held = tiny_vision.by_checkpoint_name(self.model)
        with torch.no_grad():
            for name, tensor in named:
                if name == "lm_head.weight" and self.model.config.tie_word_embeddings:
                    continue
                if name not in held:
                    raise Refused(f"Failed to update parameter online: KeyError: {name!r}")
                if held[name].shape != tensor.shape:
                    shapes = f"{list(held[name].shape)} and {list(tensor.shape)}"
                    raise Refused(f"Failed to update parameter online: {name}: shapes {shapes} do not match")
                if not tensor.is_floating_point():
                    raise Refused(f"Failed to update parameter online: {name}: {tensor.dtype}")
                held[name].copy_(tensor)
                self.loaded.add(name)

    def missing(self) -> list[str]:
        return sorted(set(tiny_vision.by_checkpoint_name(self.model)) - self.loaded)

    def join(self, body: dict[str, Any]) -> None:
        """SGLang's end of a group, made with the function that it uses."""
        from torch.distributed.distributed_c10d import (
            Backend,
            PrefixStore,
            _new_process_group_helper,
            _world,
            rendezvous,
        )

        size, name = body["world_size"], body["group_name"]
        where = f"tcp://{body['master_address']}:{body['master_port']}"
        patience = timedelta(seconds=60)
        store, rank, size = next(rendezvous(where, body["rank_offset"], size, timeout=patience))
        group, _ = _new_process_group_helper(
            size, rank, [], Backend(body["backend"]), PrefixStore(name, store), group_name=name, timeout=patience
        )
        _world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.groups[name] = group

    def receive(self, body: dict[str, Any]) -> list[tuple[str, Tensor]]:
        if body["group_name"] not in self.groups:
            raise Refused(f"Failed to receive weights: Group {body['group_name']} not in {list(self.groups)}.")
        if body.get("load_format") != "flattened_bucket":
            raise Refused("this fake knows flattened buckets alone")
        places, offset = [], 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            kind = getattr(torch, dtype)
            if offset % kind.itemsize:
                raise Refused(f"Unaligned received tensor {name}: byte offset {offset}, dtype {dtype}")
            places.append((name, kind, shape, offset))
            offset += math.prod(shape) * kind.itemsize
        flat = torch.empty(offset, dtype=torch.uint8)
        try:
            dist.broadcast(flat, src=0, group=self.groups[body["group_name"]])
        except RuntimeError as error:
            raise Refused(f"Failed to receive weights: {error}") from error
        return [
            (name, flat[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape))
            for name, kind, shape, start in places
        ]

    def load_adapter(self, body: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

        name = body["lora_name"]
        if name in self.adapters:
            raise Refused(f"LoRA adapter {name} already exists")
        for key, wanted in (body.get("expected_checksums") or {}).items():
            found = hashlib.sha256(tensors[key].contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            if found != wanted:
                raise Refused(f"[LORA-CHECK] adapter sync MISMATCH: {key}")
        known = set(LoraConfig().to_dict())
        config = LoraConfig(**{key: value for key, value in body["config_dict"].items() if key in known})
        adapted = get_peft_model(copy.deepcopy(self.model), config)
        expected = {key for key in adapted.state_dict() if ".lora_" in key}
        result = set_peft_model_state_dict(adapted, tensors)
        absent = {key for key in result.missing_keys if ".lora_" in key}
        if result.unexpected_keys or absent or len(expected) != len(tensors):
            raise Refused(f"adapter {name}: unexpected {result.unexpected_keys}, missing {sorted(absent)}")
        self.adapters[name] = adapted.eval()


def narrowed(logits: Tensor, params: dict[str, Any]) -> Tensor:
    """Logits of one row after top-k, top-p and min-p."""
    top_k, top_p, min_p = params.get("top_k", -1), params.get("top_p", 1.0), params.get("min_p", 0.0)
    ordered, order = logits.softmax(-1).sort(descending=True)
    keep = ordered.cumsum(-1) - ordered < top_p
    keep &= ordered >= min_p * ordered[0]
    if top_k > 0:
        keep[top_k:] = False
    return logits.index_fill(0, order[~keep], -math.inf)


# ---- the server ------------------------------------------------------------------------------------------------------


class FakeSglang:
    """State and routes."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.weights = Weights(options.model_path)
        self.model_path = self.started_with = options.model_path
        self.version = "default"
        self.session = False
        self.born = time.time()
        self.released: set[str] = set()
        self.running = 0
        self.aborting = False
        self.open = asyncio.Event()
        self.open.set()
        self.failures: dict[str, dict[str, Any]] = {}
        self.log: list[Any] = []

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self.gate])
        app.router.add_get("/health", self.health)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/generate", self.generate)
        app.router.add_route("*", "/flush_cache", self.flush_cache)
        for path in RECORD["bodies"]:
            handler = getattr(self, path[1:], None)
            if handler is not None:
                app.router.add_post(path, self.checked(path, handler))
        app.router.add_post("/_fail", self.fail)
        app.router.add_get("/_log", self.tell)
        return app

    @web.middleware
    async def gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = self.options.api_key
        if key and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        failure = self.failures.get(request.path)
        if failure and failure["times"]:
            failure["times"] -= 1
            if failure.get("die"):
                self.die()
            await asyncio.sleep(failure.get("hang", 0))
            if "text" in failure:
                return web.Response(text=failure["text"], status=failure["status"])
        if request.path == "/generate" or request.path in RECORD["bodies"]:
            self.log.append([request.path, await request.json()])
        return await handler(request)

    def checked(self, path: str, handler: Any) -> Any:
        async def route(request: web.Request) -> web.Response:
            try:
                body = await request.json()
                check_fields(body, RECORD["bodies"][path], path)
                return web.json_response(await handler(body) or {"success": True, "message": "Success"})
            except Refused as refused:
                kind = "error_message" if "lora" in path else "message"
                return web.json_response({"success": False, kind: str(refused)}, status=400)

        return route

    def die(self) -> None:
        """As an assertion in SGLang would have it."""
        if not self.options.in_process:
            os._exit(1)
        raise SystemError("the server died")

    # ---- what it is --------------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.open.is_set() else 503)

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.model_path,
                "served_model_name": self.model_path,
                "is_generation": True,
                "weight_version": self.version,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        o = self.options
        return web.json_response(
            {
                "version": RECORD["release"],
                "startup_time": self.born,
                "dtype": "float32",
                "tp_size": o.tp_size,
                "pp_size": 1,
                "dp_size": o.dp_size,
                "context_length": o.context_length,
                "max_total_num_tokens": 4096,
                "max_req_input_len": 4090,
                "enable_lora": o.enable_lora,
                "enable_memory_saver": o.enable_memory_saver,
                "enable_weights_cpu_backup": False,
                "enable_return_routed_experts": o.enable_return_routed_experts,
            }
        )

    # ---- sampling ----------------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            check_fields(body, RECORD["generate"], "/generate")
            for params in body["sampling_params"]:
                check_fields(params, RECORD["sampling_params"], "sampling_params")
            await self.open.wait()
            model = self.chosen(body)
            n = len(body["input_ids"])
            if body.get("logprob_start_len"):
                return web.json_response(self.scored(model, body))
            urls = body.get("image_data") or [[]] * n
            shown = [self.expanded(ids, some) for ids, some in zip(body["input_ids"], urls, strict=True)]
            self.running += 1
            try:
                rows = await asyncio.gather(
                    *(
                        self.sample(model, ids, params, (body.get("token_ids_logprob") or [[]] * n)[i], images)
                        for i, ((ids, images), params) in enumerate(zip(shown, body["sampling_params"], strict=True))
                    )
                )
            finally:
                self.running -= 1
            if body.get("return_routed_experts"):
                for (ids, _), row in zip(shown, rows, strict=True):
                    row["meta_info"]["routed_experts"] = self.routed(model, ids + row["output_ids"])
            return web.json_response(rows)
        except Refused as refused:
            return web.json_response({"error": {"message": str(refused)}}, status=400)

    def chosen(self, body: dict[str, Any]) -> Any:
        if "weights" in self.released or "kv_cache" in self.released:
            raise Refused("memory was released")
        names = set(body.get("lora_path") or [None])
        if names == {None}:
            return self.weights.model
        (name,) = names
        if name not in self.weights.adapters:
            raise Refused(f"Got LoRA adapter that has never been loaded: {name}")
        return self.weights.adapters[name]

    @torch.no_grad()
    def scored(self, model: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Log-probs of prompts' tokens, at temperature 1 whatever was asked for."""
        answers = []
        for number, ids in enumerate(body["input_ids"]):
            start, top = body["logprob_start_len"][number], body["top_logprobs_num"][number]
            vocabulary = self.weights.model.config.get_text_config().vocab_size
            asked = (body.get("token_ids_logprob") or [[]] * (number + 1))[number]
            if max(ids) >= vocabulary:
                self.die()
            if asked and max(asked) >= vocabulary:
                raise Refused(
                    f"token_ids_logprob contains out-of-vocabulary token id {max(asked)}; valid range is [0,"
                    f" {vocabulary})."
                )
            if len(ids) >= self.options.context_length:
                raise Refused(f"The input ({len(ids)} tokens) is longer than the model's context length.")
            logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            text = self.tokenizer.decode if body.get("return_text_in_logprobs") else lambda tokens: None
            own, tops = [], []
            for place in range(start, len(ids)):
                row, token = logprobs[place - 1], ids[place]
                first = place == start  # which has none
                reported = token if token < vocabulary - 1 else 0
                own.append([None if first else float(row[token]), reported, text([reported])])
                best = row.topk(top)
                pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                tops.append(None if first else [[value, one, text([one])] for value, one in pairs])
            meta = {"prompt_tokens": len(ids), "input_token_logprobs": own, "output_token_logprobs": []}
            meta |= {"finish_reason": {"type": "length", "length": 0}, "weight_version": self.version}
            answers.append(
                {"text": "", "output_ids": [], "meta_info": meta | ({"input_top_logprobs": tops} if top else {})}
            )
        return answers

    @functools.cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.started_with)

    def expanded(self, ids: list[int], urls: list[str]) -> tuple[list[int], dict[str, Any]]:
        """A prompt with its images as the model's own processor makes it: read as text, as SGLang reads it."""
        if not urls:
            return ids, {}
        processor = AutoProcessor.from_pretrained(self.started_with)  # as SGLang, which reads none with new weights
        images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
        text = processor.tokenizer.decode(ids)
        inputs = dict(processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False))
        inputs.pop("attention_mask")
        return inputs.pop("input_ids")[0].tolist(), inputs

    def routed(self, model: Any, ids: list[int]) -> str | None:
        """Experts [tokens, layers, k] of all tokens but the last, int32 in base64, of a server that keeps them."""
        if not self.options.enable_return_routed_experts:
            return None
        return base64.b64encode(routed_by(model, ids[:-1]).astype(np.int32).tobytes()).decode()

    async def sample(
        self, model: Any, prompt: list[int], params: dict[str, Any], asked: list[int], images: dict[str, Any]
    ) -> dict[str, Any]:
        limit, vocabulary = self.options.context_length, self.weights.model.config.get_text_config().vocab_size
        if max(prompt) >= vocabulary:
            self.die()
        if asked and max(asked) >= vocabulary:
            raise Refused(
                f"token_ids_logprob contains out-of-vocabulary token id {max(asked)}; valid range is [0, {vocabulary})."
            )
        if len(prompt) >= limit:
            raise Refused(f"The input ({len(prompt)} tokens) is longer than the model's context length ({limit}).")
        stop = set(params.get("stop_token_ids") or [])
        eos = self.weights.model.generation_config.eos_token_id
        stop |= set(eos if isinstance(eos, list) else [eos])
        most = min(params["max_new_tokens"], limit - len(prompt))
        tokens: list[int] = []
        triples: list[Any] = []
        others: list[Any] = []
        reason: dict[str, Any] | None = None
        while reason is None:
            if self.aborting:
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            token, logprobs = self.draw(model, prompt + tokens, params, images)
            tokens.append(token)
            triples.append([float(logprobs[token]), token, None])
            others.append([[float(logprobs[other]), other, None] for other in asked])
            if token in stop:
                reason = {"type": "stop", "matched": token}
            elif len(tokens) == most:
                reason = {"type": "length", "length": most}
            await asyncio.sleep(self.options.seconds_per_token)
        meta = {"finish_reason": reason, "weight_version": self.version, "output_token_logprobs": triples}
        meta["prompt_tokens"] = len(prompt)
        if asked:
            meta["output_token_ids_logprobs"] = others
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    @torch.no_grad()
    def draw(self, model: Any, tokens: list[int], params: dict[str, Any], images: dict[str, Any]) -> tuple[int, Tensor]:
        ids = torch.tensor([tokens])
        logits = model(ids, **tiny_vision.extended(images, ids)).logits[0, -1].float()
        greedy = params["temperature"] < 1e-6
        scaled = (logits if greedy else logits / params["temperature"]).log_softmax(-1)
        if greedy:
            token = int(logits.argmax())
        else:
            seed = hash((params.get("sampling_seed", 42), len(tokens))) % (1 << 63)
            noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed))
            token = int((narrowed(scaled, params) - (-noise.log()).log()).argmax())
        return token, logits.log_softmax(-1) if self.options.original_logprobs else scaled

    async def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("mode", "abort") != "abort":
            raise Refused("this fake pauses with abort alone")
        self.open.clear()
        self.aborting = True
        while self.running:
            await asyncio.sleep(0.01)
        self.aborting = False
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        self.open.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def flush_cache(self, request: web.Request) -> web.Response:
        end = time.monotonic() + float(request.query.get("timeout", 0))
        while self.running and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if self.running:
            return web.Response(text="Flush cache failed: requests are running.\n", status=400)
        self.log.append(["/flush_cache", None])
        return web.Response(text="Cache flushed.\n")

    async def update_weight_version(self, body: dict[str, Any]) -> None:
        self.version = body["new_version"]

    async def release_memory_occupation(self, body: dict[str, Any]) -> None:
        tags = set(body.get("tags") or TAGS)
        if self.running or not self.options.enable_memory_saver or tags - TAGS or tags & self.released:
            self.die()  # the real one's assertions end it
        self.released |= tags

    async def resume_memory_occupation(self, body: dict[str, Any]) -> None:
        tags = set(body.get("tags") or TAGS)
        if tags - self.released:
            self.die()
        if "weights" in tags:  # their contents are gone
            self.weights.load(
                (name, torch.zeros_like(p)) for name, p in tiny_vision.by_checkpoint_name(self.weights.model).items()
            )
        self.released -= tags

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def init_weights_update_group(self, body: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self.weights.join, body)
        except RuntimeError as error:
            raise Refused(f"Failed to initialize custom process group: {error}.") from error

    async def destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        group = self.weights.groups.pop(body["group_name"], None)
        if group is None:
            raise Refused("The group to be destroyed does not exist.")
        await asyncio.to_thread(dist.destroy_process_group, group)

    async def begin_weight_update(self, body: dict[str, Any]) -> None:
        if self.session:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.session = True
        self.weights.loaded.clear()

    async def end_weight_update(self, body: dict[str, Any]) -> None:
        if not self.session:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        self.session = False

    async def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        self.must_be_ready(body)
        self.weights.load(await asyncio.to_thread(self.weights.receive, body))
        self.take_version(body)

    async def update_weights_from_disk(self, body: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        self.must_be_ready(body, session=False)
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            raise Refused(f"Failed to get weights iterator: Cannot find any model weights with `{body['model_path']}`.")
        self.weights.loaded.clear()
        for file in files:
            self.weights.load(load_file(file).items())
        self.model_path = body["model_path"]
        self.take_version(body)

    def unpickled(self, body: dict[str, Any]) -> Any:
        entries = body["serialized_named_tensors"]
        if len(entries) != self.options.tp_size:
            raise Refused(f"{len(entries)} payloads for {self.options.tp_size} ranks")
        return AllowedUnpickler(io.BytesIO(base64.b64decode(entries[-1]))).load()

    def must_be_ready(self, body: dict[str, Any], session: bool = True) -> None:
        if self.open.is_set() or self.running:
            raise Refused("weights change under running requests")
        if session and not self.session:
            raise Refused("updates must run between begin_weight_update() and end_weight_update()")
        if body.get("flush_cache", True):
            self.log.append(["/flush_cache", None])

    def take_version(self, body: dict[str, Any]) -> None:
        if body.get("weight_version") is not None:
            if self.weights.missing():
                raise Refused(f"version {body['weight_version']} lacks {self.weights.missing()[:3]}")
            self.version = body["weight_version"]

    # ---- adapters ----------------------------------------------------------------------------------------------------

    async def load_lora_adapter_from_tensors(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.options.enable_lora:
            raise Refused("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        self.weights.load_adapter(body, self.unpickled(body))
        return {"success": True, "loaded_adapters": dict.fromkeys(self.weights.adapters, "__tensor__")}

    async def unload_lora_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.weights.adapters.pop(body["lora_name"], None) is None:
            raise Refused(f"LoRA with name {body['lora_name']} does not exist.")
        return {"success": True}

    # ---- for tests ---------------------------------------------------------------------------------------------------

    async def fail(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.failures[body["path"]] = {"times": 1, "status": 400, **body}
        return web.json_response({})

    async def tell(self, request: web.Request) -> web.Response:
        return web.json_response(self.log)


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--original-logprobs", action="store_true", help="as with SGLANG_RETURN_ORIGINAL_LOGPROB=1")
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--in-process", action="store_true", help="dying is an HTTP 500")
    return parser.parse_known_args(arguments)[0]


def main(arguments: list[str] | None = None) -> None:
    chosen = options(arguments)
    torch.set_num_threads(1)

    async def app() -> web.Application:
        return FakeSglang(chosen).app()

    web.run_app(app(), host=chosen.host, port=chosen.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
