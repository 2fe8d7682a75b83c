"""What a vLLM server must be started with to take weights. Imports nothing: the command line prints it."""

OLDEST = (0, 28)
"""Release from which on it has every route that is used, /weight_info being the last to come."""

WORKER = "covey.engines.servers.vllm.worker.CoveyWorker"
"""Added to vLLM's worker; importing it registers the way `BACKEND`."""

BACKEND = "covey"
"""Our way into vLLM's weight transfer, over gloo, NCCL or CUDA IPC, as the trainer asks for."""

ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Opens the routes that take weights."""

LORA_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""Opens the routes that take adapters."""

ADAPTERS = 3
"""Versions of an adapter that a server keeps at hand: the current one, and those of requests still in flight."""


AS_STARTED = "default"
"""What /weight_info says until somebody sends weights."""


def weight_flags() -> list[str]:
    """Options of `vllm serve` for weights."""
    return ["--worker-extension-cls", WORKER, "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']


def lora_flags() -> list[str]:
    """Options of `vllm serve` that go with its --enable-lora."""
    return ["--max-loras", str(ADAPTERS), "--max-cpu-loras", str(ADAPTERS)]
