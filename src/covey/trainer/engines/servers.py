"""Inference servers of a run, built from its config: addresses, keys, deadlines, transfer of weights.

To add a backend, write its `ServerApi` and `WeightApi` (`covey.engines.servers.protocols`) and a function like
`vllm_servers`.
"""

import os
import secrets
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from covey.config.base import OnlineConfig
from covey.config.engines import SERVER_FORMATS
from covey.core.findings import CheckError
from covey.core.model import unwrapped
from covey.core.routing import routing_of
from covey.engines.servers.engine import RemoteEngine
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.pool_file import PoolFile
from covey.engines.servers.server_process import ServerProcess, free_port
from covey.engines.servers.sglang import launch
from covey.engines.servers.sglang.api import SglangApi
from covey.engines.servers.sglang.weights import SglangWeightApi
from covey.engines.servers.vllm.api import VllmApi
from covey.engines.servers.vllm.weights import VllmWeightApi
from covey.engines.servers.weights.sender import WeightSender
from covey.policy.adapters import active_adapter, adapter_config, has_adapter, why_not_alone
from covey.policy.loading import end_token_ids


def vllm_servers(args: OnlineConfig, model: Any, tokenizer: Any, accelerator: Any, context: int | None) -> RemoteEngine:
    """Engine that samples from vLLM servers, which are probed here so that a wrong one fails early."""
    if args.vllm_enable_sleep_mode and accelerator.num_processes > 1:
        raise CheckError.of(
            "server-sleep",
            "vllm_enable_sleep_mode=True with vllm_mode='server' and several processes: one of them would put a server"
            " to sleep while others still sample from it.",
            "Leave it False, or train on one process.",
        )
    api_key = args.vllm_server_api_key or os.environ.get("VLLM_API_KEY") or None
    sender = WeightSender(
        VllmWeightApi(port=args.vllm_group_port),
        method=args.vllm_weight_transfer,
        folder=args.vllm_weight_folder,
        bucket_bytes=args.vllm_weight_bucket << 20,
        differences=args.vllm_weight_differences,
    )
    pool_file = pool_file_of(args, api_key)
    return RemoteEngine(
        listed(pool_file) if pool_file else [ServerClient(url, api_key) for url in args.vllm_urls],
        VllmApi(**api_settings(args, model)),
        sender,
        timeout=args.vllm_server_timeout,
        request_timeout=args.vllm_server_request_timeout,
        sync_timeout=args.vllm_server_sync_timeout,
        concurrency=args.vllm_server_concurrency,
        sleeps=args.vllm_enable_sleep_mode,
        pool_file=pool_file,
        **engine_settings(args, model, tokenizer, accelerator, context),
    )


def sglang_servers(
    args: OnlineConfig, model: Any, tokenizer: Any, accelerator: Any, context: int | None
) -> RemoteEngine:
    """Engine that samples from SGLang servers: those that are named, or one that is started here."""
    sender = WeightSender(
        SglangWeightApi(device=accelerator.device, port=args.sglang_group_port),
        method=args.sglang_weight_transfer,
        folder=args.checkpoint_path,
    )
    api_key = args.sglang_api_key or os.environ.get(launch.KEY) or None
    pool_file = pool_file_of(args, api_key)
    urls = [server.url for server in listed(pool_file)] if pool_file else args.sglang_urls
    with ExitStack() as started:
        if not urls:
            api_key = api_key or secrets.token_hex(16)
            url, process = start_sglang(args, model, accelerator, api_key)
            started.callback(process.stop)
            urls = [url]
        engine = RemoteEngine(
            [ServerClient(url, api_key) for url in urls],
            SglangApi(**api_settings(args, model)),
            sender,
            timeout=args.sglang_server_timeout,
            request_timeout=args.sglang_request_timeout,
            sync_timeout=args.sglang_sync_timeout,
            concurrency=args.sglang_concurrency,
            pool_file=pool_file,
            **engine_settings(args, model, tokenizer, accelerator, context),
        )
        weakref.finalize(engine, started.pop_all().close)  # which also keeps the process until then
    return engine


def pool_file_of(args: OnlineConfig, api_key: str | None) -> PoolFile | None:
    return PoolFile(Path(args.server_pool_file), api_key) if args.server_pool_file else None


def listed(pool_file: PoolFile) -> list[ServerClient]:
    """Servers to begin with; `CheckError` if the file names none."""
    try:
        return pool_file.servers()
    except ValueError as error:
        advice = "Write the URL of a server on each line; the file may be changed during the run."
        raise CheckError.of("setting-format", f"server_pool_file: {error}", advice) from error


def start_sglang(args: OnlineConfig, model: Any, accelerator: Any, api_key: str) -> tuple[str, ServerProcess]:
    """Start an SGLang server on `sglang_device` and wait until it is up; it ends with this process."""
    if accelerator.num_processes > 1:
        raise CheckError.of(
            "server-start",
            f"sglang_device={args.sglang_device!r} starts a server for a run of one process, and this one has"
            f" {accelerator.num_processes}.",
            "Start it with `covey sglang-serve`, and give its address (sglang_base_url).",
        )
    name = getattr(model.config, "_name_or_path", None)
    if not name:
        raise CheckError.of(
            "server-start",
            f"sglang_device={args.sglang_device!r} starts a server that loads the model by its name, and this one was"
            " made in memory:",
            "save it, and train the folder. Or give the address of a server as sglang_base_url.",
        )
    assert args.sglang_device is not None, "checked with the config"
    port = free_port()
    flags = dict(args.sglang_server_args or {})  # type: ignore[arg-type] # a config parses JSON
    if has_adapter(model) and args.vllm_lora_sync != "merged" and why_not_alone(model) is None:
        rank = adapter_config(unwrapped(model), active_adapter(unwrapped(model)))["r"]
        flags = {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": "all", **flags}
    if args.engine_dtype:
        flags = {**dict([SERVER_FORMATS[args.engine_dtype]]), **flags}
    if args.routing_replay == "R3":
        flags = {"enable_return_routed_experts": True, **flags}
    command, environment = launch.command(name, port, args.sglang_device, flags, os.environ)
    process = ServerProcess(
        command,
        f"http://127.0.0.1:{port}/health",
        log_path=Path(args.output_dir or ".") / "sglang-server.log",
        deadline=args.sglang_server_timeout,
        env={**environment, launch.KEY: api_key},
        name="the SGLang server",
    )
    return f"http://127.0.0.1:{port}", process.start()


def api_settings(args: OnlineConfig, model: Any) -> dict[str, Any]:
    """Settings of a `ServerApi` that do not depend on the backend."""
    routing = routing_of(unwrapped(model))
    return {
        "temperature": args.temperature,
        "extra": generation_extras(args),
        "vocab_size": vocabulary_of(model),
        "routes": None if routing is None else routing.shape,
    }


def engine_settings(
    args: OnlineConfig, model: Any, tokenizer: Any, accelerator: Any, context: int | None
) -> dict[str, Any]:
    """Settings of `RemoteEngine` that do not depend on the backend."""
    return {
        "ends": frozenset(end_token_ids(model, tokenizer)),
        "vocab_size": vocabulary_of(model),
        "max_context": context,
        "model_name": getattr(model.config, "_name_or_path", None) or None,
        "resend": accelerator.num_processes == 1 and args.max_staleness == 0,
    }


def generation_extras(args: OnlineConfig) -> dict[str, Any]:
    """Settings of requests in addition to those that every engine knows."""
    names: dict[str, str] = {}  # transformers' or vLLM's, and the server's
    if args.use_vllm:
        names = {"stop_strings": "stop", "min_new_tokens": "min_tokens"}
    elif args.use_sglang:
        names = {"stop_strings": "stop", "min_tokens": "min_new_tokens"}
    given = dict(args.generation_kwargs or {}).items()  # type: ignore[arg-type] # a config parses JSON
    extra = {names.get(name, name): value for name, value in given if (name, value) != ("do_sample", True)}
    shape: dict[str, Any] = {}
    if (regex := args.vllm_structured_outputs_regex) is not None and args.use_sglang:
        shape = {"regex": regex}
    elif regex is not None and args.use_vllm and args.vllm_mode == "server":
        shape = {"structured_outputs": {"regex": regex}}
    if both := extra.keys() & shape:
        raise CheckError.of(
            "settings-contradict",
            f"generation_kwargs[{both.pop()!r}] and vllm_structured_outputs_regex are both set, and only one can shape"
            " completions.",
            "Leave one of the two out.",
        )
    return extra | shape


def vocabulary_of(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])
