"""Run golden configurations in this process (or, under torchrun, with others) and write digests of what they leave.

Usage: python -m golden.child SOURCE OUTPUT NAME [NAME ...]; OUTPUT/{name}.json appears when its run has ended.
"""

import fnmatch
import gc
import hashlib
import json
import os
import random
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

EXCLUDED = (
    *("*seconds*", "*_time", "*runtime", "*_per_second"),  # durations, and rates that contain them
    *("phase/*", "overlap/*"),  # seconds by phase
    *("*memory*", "*throughput*", "*mfu*"),
)
"""Patterns of logged names that differ between two runs of the same code: times, throughput, memory."""

RENAMED = {"passes/": "micro_batches/"}
"""Beginnings of names that metrics had at earlier commits."""


def main(source: str, output: str, names: list[str]) -> None:
    """Run the configurations one after the other; a failure costs its own configuration."""
    import torch

    import covey

    torch.set_num_threads(1)
    found = Path(covey.__file__).resolve()
    if not found.is_relative_to(Path(source).resolve()):
        raise SystemExit(f"covey was imported from {found}, not from {source}")
    import datasets

    datasets.disable_progress_bars()
    from golden import configurations

    gc.freeze()
    for name in names:
        result = outcome(configurations.RUNS[name], Path(output) / "runs" / name)
        failed_with_others = "error" in result and torch.distributed.is_initialized()
        if rank() == 0 or failed_with_others:
            path = Path(output) / f"{name}.json"
            part = path.with_suffix(f".{rank()}")
            part.write_text(json.dumps(result))
            part.rename(path)
        if failed_with_others:
            os._exit(1)  # the other process waits in a collective; torchrun ends it
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # gloo's threads must not outlive the interpreter
    sys.stdout.flush()
    os._exit(0)  # threads of engines end with the process


def outcome(run: Any, output: Path) -> dict[str, Any]:
    """Train one configuration; its digests and logs, or its error."""
    import numpy
    import torch

    from golden.parts import SAMPLES

    SAMPLES.clear()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained = run.train(output)
            weights = weights_digest(trained.model)
        logs = [without_times(entry) for entry in trained.state.log_history]
        samples = sorted(map(sample_record, SAMPLES), key=json.dumps)
        weights, samples = over_processes(weights, samples)
    except Exception:
        return {"error": traceback.format_exc(), "seconds": time.perf_counter() - began}
    return {
        "weights": weights,
        "logs": digest(logs),
        "samples": digest(samples),
        "entries": logs,
        "records": samples,
        "seconds": time.perf_counter() - began,
    }


def weights_digest(model: Any) -> str:
    """SHA-256 over the sorted names, types, shapes and bytes of a model's state dict; sharded tensors are gathered."""
    import torch

    sums = hashlib.sha256()
    state = {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in sorted(state.items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole = whole.detach().cpu().contiguous()
        sums.update(f"{name} {whole.dtype} {list(whole.shape)}\n".encode())
        sums.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    """A log without the names of `EXCLUDED`; numbers are kept to the last digit."""
    entry = {_renamed(name): value for name, value in entry.items()}
    kept = {k: v for k, v in entry.items() if not any(fnmatch.fnmatchcase(k, pattern) for pattern in EXCLUDED)}
    return {k: v if isinstance(v, int | float | str | None) else repr(v) for k, v in sorted(kept.items())}


def _renamed(name: str) -> str:
    return next((new + name.removeprefix(old) for old, new in RENAMED.items() if name.startswith(old)), name)


def sample_record(sample: dict[str, Any]) -> list[Any]:
    """A sample as [step, function, names of arguments, digest of their values]."""
    return [sample["step"] or 0, sample["function"], " ".join(sample["names"]), digest(sample["values"])[:16]]


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def over_processes(weights: str, samples: list[Any]) -> tuple[str, list[Any]]:
    """The digests of all processes as one, and all of their samples."""
    import torch

    if not torch.distributed.is_initialized():
        return weights, samples
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (weights, samples))
    together = [sample for _, part in found for sample in part]
    return digest([each for each, _ in found]), sorted(together, key=json.dumps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
