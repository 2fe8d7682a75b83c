"""A fake vLLM server that takes weights as `CoveyWorker` lets the real one: over a group, as folders, as adapters.

The bytes, checks and groups are the real ones (`channels.join`, `buckets.unpack`, `folders.read_folder`), and what
arrives is loaded into a transformers model, so a wrong name, shape or number format fails as it would there.
"""

import asyncio
import copy
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from covey.engines.servers.weights.buckets import Receiver
from covey.engines.servers.weights.channels import boot_id, join
from covey.engines.servers.weights.files import read_folder
from tests.support.servers.fake_vllm import FakeVllm, _refusal


class FakeVllmWeights(FakeVllm):
    """Adds the routes for weights.

    Attributes:
        adapters: tensors of loaded adapters, by name.

    Args:
        backend: of its weight transfer.
        max_lora_rank: None: started without adapters.
        elsewhere: claims to run on another machine, and finds no folder of the trainer's.
        worker: it has our worker, which says what it is; False: a plain `vllm serve`.
        differences: it can hold a copy of the weights; False: as a release before that.
    """

    def __init__(
        self,
        model: Any,
        *,
        backend: str = "covey",
        max_lora_rank: int | None = None,
        elsewhere: bool = False,
        worker: bool = True,
        differences: bool = True,
    ):
        super().__init__(model)
        self.differences = differences
        self.worker = worker
        self.backend, self.max_lora_rank, self.elsewhere = backend, max_lora_rank, elsewhere

    def start(self) -> "FakeVllmWeights":
        self.born, self.channel, self.active, self.adapters = uuid.uuid4().hex, None, False, {}
        self.receiver = Receiver()
        super().start()
        return self

    def kill(self) -> None:
        super().kill()
        if self.channel is not None:
            self.channel.close()

    def _routes(self) -> list[web.RouteDef]:
        steps = {
            "/init_weight_transfer_engine": self._meet,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        return [web.post(path, self._said(step)) for path, step in steps.items()] + super()._routes()

    def _said(self, step: Any) -> Any:
        """An exception's words become the answer, as vLLM's do."""

        async def answer(request: web.Request) -> web.Response:
            body = json.loads(await request.text() or "{}")
            try:
                result = await asyncio.to_thread(step, body)
            except Exception as error:
                return _refusal(f"Call to collective_rpc method failed: {error}", 500)
            return web.json_response(result if result is not None else {"message": "done"})

        return answer

    def _meet(self, body: dict[str, Any]) -> None:
        info = body["init_info"]
        self.channel = join(
            info["channel"], info["address"], info["port"], info["name"], 1, info["world_size"], info["seconds"]
        )

    def _start(self, body: dict[str, Any]) -> None:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.active, self.arrived, self.count = True, {}, 0

    def _update(self, body: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        piece = body["update_info"]
        try:
            assert piece["number"] == self.count, "buckets come in order"
            self.arrived |= self._take(piece)
        except BaseException:
            self.active = False
            raise
        self.count += 1
        self.whole = self.count == piece["count"]

    def _take(self, piece: dict[str, Any]) -> dict[str, torch.Tensor]:
        if self.channel is None:
            raise RuntimeError("no trainer is connected")
        data = self.channel.receive(piece["manifest"]["nbytes"], torch.device("cpu"), float(piece["seconds"]))
        return {
            name: tensor.clone() for name, tensor in self.receiver.take(piece["manifest"], data, piece.get("number", 0))
        }

    def _finish(self, body: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.active = False
        if not self.whole:
            raise RuntimeError("weights are incomplete")
        self.receiver.finish()
        self._use(self.arrived)
        if body.get("weight_version") is not None:
            self.stamp = body["weight_version"]

    def _use(self, tensors: dict[str, torch.Tensor]) -> None:
        model = copy.deepcopy(self.model)
        model.load_state_dict(tensors, strict=False)
        assert tensors.keys() == dict(model.named_parameters()).keys(), "all of the model's, and nothing else"
        self.model = model

    def _load_adapter(self, body: dict[str, Any]) -> None:
        if self.max_lora_rank is None:
            raise RuntimeError("LoRA is not enabled")
        tensors = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        assert (Path(body["lora_path"]) / "adapter_config.json").is_file()
        rank = max(t.shape[0] for name, t in tensors.items() if "lora_A" in name)
        if rank > self.max_lora_rank:
            raise ValueError(f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}.")
        if body["lora_name"] in self.adapters:
            raise ValueError(f"The lora adapter '{body['lora_name']}' has already been loaded.")
        self.adapters[body["lora_name"]] = tensors

    def _unload_adapter(self, body: dict[str, Any]) -> None:
        del self.adapters[body["lora_name"]]

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        method = getattr(self, f"_{body['method']}", None)
        if method is None or not self.worker:
            return await super()._collective_rpc(request)

        def call(_: dict[str, Any]) -> dict[str, Any]:
            return {"results": [method(**body.get("kwargs", {}))]}

        return await self._said(call)(request)

    def _covey_facts(self) -> dict[str, Any]:
        boot = "another" if self.elsewhere else boot_id()
        facts = {"backend": self.backend, "device": "cpu", "gpu": None, "boot": boot, "born": self.born}
        return {**facts, "max_lora_rank": self.max_lora_rank, "differences": self.differences}

    def _covey_load_folder(self, folder: str) -> dict[str, Any]:
        read_folder(Path(folder), lambda tensors: self._use({name: tensor.clone() for name, tensor in tensors}))
        return {"loaded": folder}

    def _covey_take_adapter(self, name: str, config: str, manifest: dict[str, Any], seconds: float) -> dict[str, Any]:
        from safetensors.torch import save_file

        folder = self.home / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
        save_file(self._take({"manifest": manifest, "seconds": seconds}), folder / "adapter_model.safetensors")
        return {"folder": str(folder)}

    def _covey_forget_adapter(self, name: str) -> dict[str, Any]:
        shutil.rmtree(self.home / name, ignore_errors=True)  # in a folder of the trainer's
        return {"removed": name}
