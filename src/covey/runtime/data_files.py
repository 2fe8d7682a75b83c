"""Reading of checkpoints as data, so that no code in their files is run."""

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment

WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
OF_SHARDS = {  # names that are loaded from a `.metadata` file; none: its own classes
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (),
    "torch.serialization": ("_get_layout",),
}
OF_DEEPSPEED = (  # in the files of its optimizers
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)


class _DataOfShards(pickle.Unpickler):
    """Unpickler that accepts only the classes that torch writes about a sharded checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        names = OF_SHARDS.get(module)
        if names is not None and (not names or name in names):
            found = super().find_class(module, name)
            if names or getattr(found, "__module__", None) == module:
                return found
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


@contextmanager
def loading_data_alone(checkpoint: str | None) -> Iterator[None]:
    """Context in which torch loads only what `weights_only` allows, even if FSDP or DeepSpeed ask for any object."""
    for path in Path(checkpoint).rglob("*.metadata") if checkpoint is not None else ():
        with path.open("rb") as file:  # which torch reads with `pickle.load`
            _DataOfShards(file).load()
    there = OF_DEEPSPEED if "deepspeed" in sys.modules else ()
    allowed = [getattr(import_module(module), name) for module, name in there]
    with patch_environment(**{WEIGHTS_ONLY: "1"}), torch.serialization.safe_globals(allowed):
        yield


@contextmanager
def refusing_objects() -> Iterator[None]:
    """Context that explains torch's error for a checkpoint file with objects that it refuses to load."""
    try:
        yield
    except BaseException as error:
        shards = error.failures.values() if type(error).__name__ == "CheckpointException" else ()  # type: ignore[attr-defined]
        if not any(isinstance(one, pickle.UnpicklingError) for one in (error, *(reason for reason, _ in shards))):
            raise
        raise ValueError(
            "the checkpoint has Python objects other than tensors and numbers, which could run any code, so they were"
            " not loaded: another program has written them. Begin a new run from its weights, with it as `model`."
        ) from error
