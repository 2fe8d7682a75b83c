"""Fields about vLLM and SGLang, and about the correction of their numerical mismatch with the trainer."""
# ruff: noqa: RUF009 - `described` makes a dataclass field

import math
from dataclasses import dataclass
from typing import Any

from covey.config.groups.describe import described

SECONDS: dict[str, Any] = {"gt": 0, "lt": math.inf, "advice": "It is in seconds."}
REQUESTS: dict[str, Any] = {"ge": 1, "advice": "A few hundred keep a GPU busy."}


@dataclass
class VllmFields:
    """Sampling with vLLM."""

    use_vllm: bool = described(False, "Sample with vLLM rather than with the built-in engine.")
    vllm_mode: str = described(
        "colocate",
        "`colocate`: vLLM shares the training devices; `server`: it runs as a server of its own.",
        choices=("colocate", "server"),
    )
    vllm_model_impl: str = described(
        "vllm",
        "Model code that vLLM runs: `vllm` for its own, `transformers` for transformers'.",
        choices=("vllm", "transformers"),
    )
    vllm_enable_sleep_mode: bool = described(
        False,
        "Release vLLM's memory while the policy is trained; waking up takes time. In server mode only on one process.",
    )
    vllm_sleep_level: int = described(
        1,
        "Place of vLLM's weights while it sleeps: 1 keeps them in host memory, 2 discards them, so that the policy's "
        "are sent at every waking.",
    )
    vllm_structured_outputs_regex: str | None = described(None, "Regular expression that every completion must match.")
    vllm_server_base_url: str | None = described(
        None,
        "URL of the vLLM server, as in http://localhost:8000, or of several: a list, or with commas between them. "
        "Replaces host and port.",
    )
    vllm_server_host: str = described("0.0.0.0", "Host of the vLLM server; 0.0.0.0 means this machine.")
    vllm_server_port: int = described(
        8000, "Port of the vLLM server.", ge=1, le=65535, advice="vLLM listens at 8000 by default."
    )
    vllm_server_timeout: float = described(
        240.0,
        "Seconds to wait for vLLM servers to be up: at the start, and again when all of them have failed.",
        **SECONDS,
    )
    vllm_server_request_timeout: float = described(
        800.0, "Seconds that one prompt's completions may take at a vLLM server before another one is asked.", **SECONDS
    )
    vllm_server_sync_timeout: float = described(
        600.0, "Seconds that sending the new weights to vLLM servers may take.", **SECONDS
    )
    vllm_server_concurrency: int = described(512, "Most completions in flight at once at one vLLM server.", **REQUESTS)
    vllm_server_api_key: str | None = described(
        None, "Key of the vLLM servers. Unset: the environment variable VLLM_API_KEY, where no log shows it."
    )
    vllm_group_port: int = described(51216, "Port over which weights are sent to the vLLM server.")
    vllm_weight_transfer: str = described(
        "auto",
        "Transfer of weights to vLLM servers: over a `group` of processes (gloo, NCCL), by `ipc` (memory of a GPU that "
        "both use), as files on `disk`. `auto`: the group if the servers can, else files.",
        choices=("auto", "group", "ipc", "disk"),
    )
    vllm_weight_folder: str | None = described(
        None,
        "Folder for weights that travel as files; trainer and servers see it under this name. Unset: a temporary one, "
        "for servers on this machine.",
    )
    vllm_weight_bucket: int = described(128, "MiB of weights sent at once over a group or by ipc.", ge=1)
    vllm_lora_sync: str = described(
        "auto",
        "Transfer of a LoRA model to vLLM: the `adapter` alone (small), or `merged` weights. `auto`: the adapter where "
        "it and vLLM allow that.",
        choices=("auto", "adapter", "merged"),
    )
    vllm_gpu_memory_utilization: float | str | None = described(
        0.3,
        "Share of a GPU's memory that vLLM may take, between 0 and 1 (colocate mode). `auto` and unset: worked out "
        "from the model, the batch sizes and the GPU, as `covey explain` shows.",
    )
    vllm_max_model_length: int | None = described(
        None, "Context length of vLLM, in tokens. Unset: the model's own, or what memory allows (colocate mode).", ge=1
    )
    vllm_tensor_parallel_size: int = described(1, "GPUs over which vLLM splits the model (colocate mode).", ge=1)
    vllm_engine_kwargs: dict | str | None = described(
        None, "Further arguments of vLLM's engine, those of `vllm.EngineArgs` (a dict or JSON; colocate mode)."
    )
    offload_model: bool = described(
        False, "Move the policy to host memory while vLLM samples (colocate mode, with vllm_enable_sleep_mode)."
    )
    offload_optimizer: bool = described(
        False, "Move the optimizer's state to host memory while vLLM samples (colocate mode, with the same)."
    )
    move_model_batches: int | None = described(
        None,
        "Batches of layers in which the policy's weights are gathered for vLLM (colocate mode). Fewer are faster and "
        "hold more in memory at once; unset: one tensor at a time.",
        ge=1,
    )


@dataclass
class MismatchFields:
    """The difference between any engine's log-probabilities and the trainer's."""

    vllm_importance_sampling_correction: bool = described(
        True,
        "Weigh the loss by trainer probability over engine probability, for their numerical mismatch. Holds for any "
        "engine but the built-in one, which hardly needs it: see `correct_built_in_engine`.",
    )
    vllm_importance_sampling_mode: str = described(
        "sequence_mask",
        "Ratio per `token` or per `sequence`, and its treatment beyond the bounds: `_truncate` sets it to the bound, "
        "`_mask` drops the token or sequence.",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    vllm_importance_sampling_clip_max: float | None = described(3.0, "Upper bound of that ratio; unset: none.")
    vllm_importance_sampling_clip_min: float | None = described(None, "Lower bound of that ratio; unset: none.")
    vllm_importance_sampling_cap: float | None = described(
        None, "Old name of `vllm_importance_sampling_clip_max`; use that one."
    )
    correct_built_in_engine: bool = described(
        False,
        "Apply that correction to the built-in engine too. It samples with the weights that are trained, so only the "
        "rounding of half precision is there to be corrected.",
    )
    engine_parity: str = described(
        "raise",
        "When the first samples of an engine have other log-probabilities than the trainer gives them, by more than "
        "rounding explains: `raise` ends the run and names the likely cause, `warn` goes on, `off` does not compare.",
        choices=("raise", "warn", "off"),
    )


@dataclass
class ContinuousBatchingFields:
    """Accepted for scripts that ask for it: the built-in engine batches continuously itself."""

    use_transformers_continuous_batching: bool = described(
        False, "No effect: the built-in engine batches continuously itself, and samples in place of transformers'."
    )
    transformers_continuous_batching_config: dict | str | None = described(
        None, "No effect; `max_concurrent_completions` bounds the batch of the built-in engine."
    )
    use_transformers_paged: bool = described(False, "Old name of `use_transformers_continuous_batching`; use that one.")


@dataclass
class SglangFields:
    """Sampling with an SGLang server."""

    use_sglang: bool = described(False, "Sample with SGLang servers rather than with the built-in engine.")
    sglang_base_url: str | None = described(
        None,
        "URL of the SGLang server, or of several: a list, or with commas between them. Unset, and without "
        "`sglang_device`: http://127.0.0.1:30000.",
    )
    sglang_device: str | None = described(
        None,
        "Without a URL: start an SGLang server on this device, as in `cuda:1`, which the trainer itself must not use.",
    )
    sglang_server_args: dict | str | None = described(
        None, 'Further flags of the server that is started (a dict or JSON), as in {"mem_fraction_static": 0.8}.'
    )
    sglang_api_key: str | None = described(
        None, "Key of the SGLang servers. Unset: the environment variable SGLANG_API_KEY, where no log shows it."
    )
    sglang_server_timeout: float = described(
        600.0,
        "Seconds to wait for SGLang servers to be up: at the start, and again when all of them have failed.",
        **SECONDS,
    )
    sglang_request_timeout: float = described(
        800.0,
        "Seconds that one prompt's completions may take at an SGLang server before another one is asked.",
        **SECONDS,
    )
    sglang_sync_timeout: float = described(
        600.0, "Seconds that sending the new weights to SGLang servers may take.", **SECONDS
    )
    sglang_concurrency: int = described(512, "Most completions in flight at once at one SGLang server.", **REQUESTS)
    sglang_weight_transfer: str = described(
        "auto",
        "Transfer of weights to SGLang servers: `group` broadcasts them, `tensor` sends them in shared memory or over "
        "HTTP, `disk` writes them to `checkpoint_path`; `auto` takes the first of these that every server has.",
        choices=("auto", "group", "tensor", "disk"),
    )
    sglang_group_port: int = described(
        0,
        "Port over which weights are broadcast to SGLang servers, and the first of as many as servers. 0: free ones.",
        ge=0,
        le=65535,
        advice="0 takes a free port.",
    )
    checkpoint_path: str | None = described(
        None,
        "Folder through which weights reach SGLang servers, which must see it under the same name. Unset: a temporary "
        "one, for servers on this machine.",
    )
