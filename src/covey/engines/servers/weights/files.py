"""Weights as files: folders of safetensors and a manifest, for servers that share a disk with the trainer."""

import json
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.core.engine import WeightUpdate
from covey.engines.servers.weights.buckets import check, pack

MANIFEST = "covey_manifest.json"


@dataclass(eq=False)
class CheckpointDir:
    """A new directory for weight folders, inside `folder` (None: temporary), which is removed with this object."""

    folder: str | None
    _remove: Callable[[], object] = lambda: None

    @cached_property
    def path(self) -> Path:
        parent = Path(self.folder or tempfile.gettempdir()).absolute()
        created = parent / f"covey-weights-{uuid.uuid4().hex[:8]}"
        try:
            created.mkdir(mode=0o700 if self.folder is None else 0o777, parents=True)
        except OSError as error:
            raise _cannot_write(parent, error) from error
        self._remove = weakref.finalize(self, shutil.rmtree, created, ignore_errors=True)
        return created

    def write(self, update: WeightUpdate, name: str, bucket_bytes: int) -> Path:
        """Write an update into the folder `name`; RuntimeError if the disk is full or read-only."""
        from safetensors import SafetensorError

        folder = self.path / name
        try:
            write_folder(update, folder, bucket_bytes)
        except (OSError, SafetensorError) as error:
            raise _cannot_write(folder, error, update.nbytes) from error
        return folder

    def clear(self) -> None:
        self._remove()
        vars(self).pop("path", None)


def _cannot_write(folder: Path, error: Exception, nbytes: int = 0) -> RuntimeError:
    size = f"They are {nbytes / 2**20:.3g} MiB. " if nbytes else ""
    return RuntimeError(
        f"weights for servers cannot be written to {folder} ({error}). {size}Make room there, or set vllm_weight_folder"
        " (SGLang: checkpoint_path) to a folder that can be written to and that the servers see under the same name."
    )


def write_folder(update: WeightUpdate, folder: Path, bucket_bytes: int) -> None:
    """Write an update in the format of `save_pretrained`; the folder appears under its name when it is complete."""
    from safetensors.torch import save_file

    staging = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
    staging.mkdir(parents=True)
    try:
        limit = bucket_bytes if update.adapter is None else max(update.nbytes * 2, 1)  # an adapter is one file
        index: dict[str, str] = {}
        sums: dict[str, int] = {}
        for bucket in pack(update, limit, torch.device("cpu")):
            count = bucket.count
            file = "model.safetensors" if count == 1 else f"model-{bucket.number + 1:05d}-of-{count:05d}.safetensors"
            file = "adapter_model.safetensors" if update.adapter is not None else file
            tensors = bucket.tensors()
            save_file(tensors, staging / file, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, file)
            sums |= {entry.spec.name: entry.checksum for entry in bucket.entries}
        if update.adapter is not None:
            (staging / "adapter_config.json").write_text(json.dumps(update.adapter, indent=2))
        elif len(set(index.values())) > 1:
            listing = {"metadata": {"total_size": update.nbytes}, "weight_map": index}
            (staging / "model.safetensors.index.json").write_text(json.dumps(listing))
        manifest = {"version": update.version, "files": index, "checksums": sums}
        (staging / MANIFEST).write_text(json.dumps(manifest))
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def read_folder(folder: Path, consume: Callable[[Iterator[tuple[str, Tensor]]], Any]) -> None:
    """Pass a folder's tensors to `consume`, after all were compared with the manifest (ValueError if they differ)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no {MANIFEST} in {folder} as this server sees it: trainer and server must see the same disk"
        ) from error
    for name, tensor in _tensors(folder, manifest):
        check(name, tensor, manifest["checksums"][name])
    consume(_tensors(folder, manifest))


def _tensors(folder: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    by_file: dict[str, set[str]] = {}
    for name, file in manifest["files"].items():
        by_file.setdefault(file, set()).add(name)
    for file, names in by_file.items():
        if Path(file).name != file:
            raise ValueError(f"{file!r} in the manifest of {folder} is not the name of a file in it")
        with safe_open(folder / file, framework="pt") as opened:
            found = set(opened.keys())
            if found != names:
                raise ValueError(f"{file} holds other tensors than its manifest lists: {sorted(found ^ names)[:5]}")
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)
