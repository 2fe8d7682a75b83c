"""Worker extension that `--worker-extension-cls` loads into vLLM's processes.

It registers a backend of vLLM's weight transfer, adds methods for `/collective_rpc`, and applies the temperature of a
request to the log-probs of its prompt. It never unpickles data that it receives.
"""

import contextlib
import json
import shutil
import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from covey.engines.servers.vllm import prompt_temperature
from covey.engines.servers.vllm.launch import BACKEND
from covey.engines.servers.weights.buckets import Receiver, unpack
from covey.engines.servers.weights.channels import Group, boot_id, join
from covey.engines.servers.weights.files import read_folder
from covey.engines.vllm_colocate.process import repack_heads

MEMORY = Path("/dev/shm")  # where processes of a server share a copy of the weights
BORN = uuid.uuid4().hex  # id of this process: a restarted server has another


@dataclass
class Meeting(WeightTransferInitInfo):
    """Arguments of `channels.join`."""

    channel: str
    address: str
    port: int
    name: str
    world_size: int
    seconds: float


@dataclass
class Piece(WeightTransferUpdateInfo):
    """One bucket: the `number`th of `count`, with its manifest."""

    version: str
    number: int
    count: int
    manifest: dict[str, Any]
    seconds: float


class CoveyWeights(WeightTransferEngine[Meeting, Piece]):
    """Receives a whole model in buckets.

    vLLM fuses, splits and repacks tensors as it loads them. Therefore differences that a trainer sends are applied to a
    copy of the checkpoint's tensors in host memory, and whole layers are loaded from that copy.
    """

    init_info_cls = Meeting
    update_info_cls = Piece
    channel: Group | None = None
    expected: tuple[str, int] | None = None  # version and number of the next bucket; None between updates
    receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self.shutdown()
        where = self.parallel_config
        rank = 1 + where.data_parallel_index * where.world_size + where.rank
        self.channel = join(rank=rank, **asdict(init_info))

    def start_weight_update(self) -> None:
        """Prepare the layers for tensors of a checkpoint, also after an update that failed halfway."""
        if self.expected is not None:
            finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)
        self.expected = ("", 0)

    def receive_weights(self, update_info: Piece) -> None:
        assert self.expected is not None, "vLLM calls `start_weight_update` first"
        version, number = self.expected
        if update_info.number != number or (number and update_info.version != version):
            raise ValueError(
                f"bucket {update_info.number} of version {update_info.version} was sent, but bucket {number} of version"
                f" {update_info.version if not number else version} is next"
            )
        data = self.receive(update_info.manifest, update_info.seconds)
        if self.receiver is None:
            several = self.parallel_config.world_size * self.parallel_config.data_parallel_size > 1
            self.receiver = Receiver(MEMORY if several and MEMORY.is_dir() else None)
        self.model.load_weights(self.receiver.take(update_info.manifest, data, number))
        done = number + 1 == update_info.count
        self.expected = (update_info.version, -1 if done else number + 1)

    def receive(self, manifest: dict[str, Any], seconds: float) -> torch.Tensor:
        if self.channel is None:
            raise RuntimeError("no trainer is connected: call /init_weight_transfer_engine first")
        return self.channel.receive(int(manifest["nbytes"]), self.device, seconds)

    def finish_weight_update(self) -> None:
        """Put the weights in use. RuntimeError if some are missing; the model then works with two versions mixed."""
        if self.expected is None:
            return
        (version, number), self.expected = self.expected, None
        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)
        if number != -1:
            raise RuntimeError(f"weights of version {version} are incomplete: bucket {number} was never sent")
        if self.receiver is not None:
            self.receiver.finish()

    def shutdown(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class CoveyWorker:
    """Methods of vLLM's worker for `/collective_rpc`; their arguments and results are JSON."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    device: Any

    def covey_facts(self) -> dict[str, Any]:
        transfer, lora = self.vllm_config.weight_transfer_config, self.vllm_config.lora_config
        gpu = str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else None
        return {
            "backend": transfer.backend if transfer is not None else None,
            "device": self.device.type,
            "gpu": gpu,
            "boot": boot_id(),
            "born": BORN,
            "max_lora_rank": lora.max_lora_rank if lora is not None else None,
            "differences": True,
        }

    def covey_load_folder(self, folder: str) -> dict[str, Any]:
        """Load a folder of safetensors, after all its tensors were compared with its manifest."""
        with set_current_vllm_config(self.vllm_config):
            read_folder(Path(folder), consume=lambda named: self.model_runner.reload_weights(weights_iterator=named))
            repack_heads(self.model_runner.get_model())
        return {"loaded": folder}

    def covey_take_adapter(self, name: str, config: str, manifest: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Write an adapter from the trainer's channel into a folder of this machine, for `/v1/load_lora_adapter`."""
        from safetensors.torch import save_file

        if not isinstance(self.weight_transfer_engine, CoveyWeights):
            raise RuntimeError(f"an adapter can be taken by the weight transfer backend {BACKEND!r} alone")
        data = self.weight_transfer_engine.receive(manifest, seconds)
        tensors = {key: tensor.cpu() for key, tensor in unpack(manifest, data)}
        folder = _adapter_folder(name)
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(json.loads(config)))
        staging = folder / f"{uuid.uuid4().hex}.partial"  # workers of one machine write the same file
        save_file(tensors, staging)
        staging.rename(folder / "adapter_model.safetensors")
        return {"folder": str(folder)}

    def covey_forget_adapter(self, name: str) -> dict[str, Any]:
        shutil.rmtree(_adapter_folder(name), ignore_errors=True)
        return {"removed": name}


def _adapter_folder(name: str) -> Path:
    if not name.replace("-", "").replace(".", "").isalnum() or ".." in name:
        raise ValueError(f"{name!r} is not the name of an adapter: letters, digits, '-' and '.' are allowed")
    return Path(tempfile.gettempdir()) / f"covey-adapter-{name}"


with contextlib.suppress(ValueError):  # this module was imported under another name before
    WeightTransferEngineFactory.register_engine(BACKEND, CoveyWeights)
prompt_temperature.install()
