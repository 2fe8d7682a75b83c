"""SGLang's own request classes, without a GPU: imports the real package where its CUDA kernels cannot be installed.

`python sglang_package.py` writes down what `fake_sglang` checks requests against; run it with .venv-sglang after a
change of release (see `make test-sglang`).
"""

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

RECORD = Path(__file__).with_name("sglang_record.json")

KERNELS = {"triton", "torchvision", "sgl_kernel", "flashinfer", "numba", "cuda"}
"""Packages that the request classes import on their way and never use."""

BODIES = {
    "/abort_request": "AbortReq",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/load_lora_adapter": "LoadLoRAAdapterReqInput",
    "/load_lora_adapter_from_tensors": "LoadLoRAAdapterFromTensorsReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
}
"""The class of `sglang.srt.managers.io_struct` that each route reads its body as."""

UNREAD = ("return_routed_experts",)
"""Fields of `GenerateReqInput` that the schema of `/generate` does not have, and lets pass."""

WIRE_ONLY = ("rid", "http_worker_ipc", "lora_id")
"""Fields that servers fill in for themselves."""


class _Absent(type):
    """Decorates, subscripts and has every attribute, as a name from a missing package is used at import."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything

    def __getitem__(cls, item: Any) -> Any:
        return _Anything


class _Anything(metaclass=_Absent):
    pass


class _AbsentModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0"
    __all__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_kernel = name.partition(".")[0] in KERNELS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_kernel else None

    def create_module(self, spec: Any) -> Any:
        return _AbsentModule(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@contextmanager
def absent_kernels() -> Iterator[None]:
    """Within this context, what is missing for want of a GPU can be imported all the same."""
    import torch._inductor.select_algorithm  # noqa: F401 - must not take a stand-in for the real Triton
    import transformers  # noqa: F401

    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _AbsentModule)]:
            del sys.modules[name]


def load() -> types.SimpleNamespace:
    """The real classes: `io` (io_struct), `api` (the JSON contract of /generate), `serializer`, `unpickler`."""
    with absent_kernels():
        io = importlib.import_module("sglang.srt.managers.io_struct")
        api = importlib.import_module("sglang.api.v1.api_types")
        common = importlib.import_module("sglang.srt.utils.common")
    return types.SimpleNamespace(
        io=io, api=api, serializer=common.MultiprocessingSerializer, unpickler=common.SafeUnpickler
    )


def describe() -> dict[str, Any]:
    """Facts about requests from the package."""
    real = load()
    return {
        "release": importlib.metadata.version("sglang"),
        "sampling_params": _fields(real.api.SamplingParams),
        "generate": {
            name: kind
            for name, kind in _dataclass_fields(real.io.GenerateReqInput).items()
            if name in {*UNREAD, *(field.name for field in _struct_fields(real.api.GenerateRequest))}
        },
        "bodies": {path: _fields(getattr(real.io, name)) for path, name in BODIES.items()},
        "allowed_globals": sorted(map(list, real.unpickler.ALLOWED_GLOBALS)),
    }


def _struct_fields(struct: Any) -> Any:
    import msgspec

    return msgspec.structs.fields(struct)


def _fields(struct: Any) -> dict[str, Any]:
    return {
        field.name: {"type": _kind(field.type), "required": field.required}
        for field in _struct_fields(struct)
        if field.name not in WIRE_ONLY
    }


def _dataclass_fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {
        field.name: {"type": _kind(hints[field.name]), "required": False}
        for field in dataclasses.fields(kind)
        if field.name not in WIRE_ONLY
    }


def _kind(annotation: Any) -> Any:
    """A type as JSON: a name, {"list": of}, {"dict": of values}, {"any of": [...]} or {"one of": [...]}."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(args[0])
    if origin in (typing.Union, types.UnionType):
        return {"any of": [_kind(arg) for arg in args]}
    if origin is typing.Literal:
        return {"one of": list(args)}
    if origin in (list, set):
        return {"list": _kind(args[0])}
    if origin is dict:
        return {"dict": _kind(args[1]) if args else "any"}
    names = {str: "str", int: "int", float: "float", bool: "bool", bytes: "base64", type(None): "null", dict: "any"}
    return names.get(annotation, "any")


if __name__ == "__main__":
    RECORD.write_text(json.dumps(describe(), indent=1) + "\n")
