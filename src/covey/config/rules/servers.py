"""Rules about sampling from inference servers."""

import math
from typing import Any

from covey.config.rules.helpers import ignored, within

SERVER_ONLY = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_server_request_timeout",
    "vllm_server_sync_timeout",
    "vllm_server_concurrency",
    "vllm_server_api_key",
    "vllm_group_port",
    "vllm_weight_transfer",
    "vllm_weight_folder",
    "vllm_weight_bucket",
)
"""Fields that vLLM in the trainer's process has no use for."""


def one_engine_samples(args: Any) -> None:
    """Only one of the engines is asked for."""
    named = [name for name in ("use_vllm", "use_sglang", "use_transformers_continuous_batching") if getattr(args, name)]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(f'{name}=True' for name in named)}: one engine samples. Leave the other out.")


def server_settings_are_read(args: Any) -> None:
    """Settings of a mode need that mode, and an address is given in one way."""
    if not args.use_vllm:
        return
    if args.vllm_mode != "server":
        ignored(args, SERVER_ONLY, f"vllm_mode is {args.vllm_mode!r}, not 'server'")
        return
    if args.vllm_server_base_url:
        ignored(args, ["vllm_server_host", "vllm_server_port"], "vllm_server_base_url replaces it")
    ignored(args, ["max_concurrent_completions"], "it is for the built-in engine; set vllm_server_concurrency")


def server_limits_are_positive(args: Any) -> None:
    """Deadlines lie ahead, and a server is given something to do."""
    for name in ("vllm_server_timeout", "vllm_server_request_timeout", "vllm_server_sync_timeout"):
        within(args, name, "above 0, and finite", lambda x: 0 < x < math.inf, "It is in seconds.")
    within(args, "vllm_server_concurrency", "1 or more", lambda x: x >= 1, "A few hundred keep a GPU busy.")
    within(args, "vllm_server_port", "1 to 65535", lambda x: 1 <= x <= 65535, "vLLM listens at 8000 by default.")


def sglang_settings_are_read(args: Any) -> None:
    """A server is either named or started."""
    if not args.use_sglang:
        return
    if args.sglang_base_url:
        ignored(args, ["sglang_device", "sglang_server_args"], "sglang_base_url names servers that run already")
    elif not args.sglang_device:
        ignored(args, ["sglang_server_args"], "no server is started: sglang_device is not set")
    ignored(args, ["max_concurrent_completions"], "it is for the built-in engine; set sglang_concurrency")


def sglang_limits_are_positive(args: Any) -> None:
    """Deadlines lie ahead, and a server is given something to do."""
    for name in ("sglang_server_timeout", "sglang_request_timeout", "sglang_sync_timeout"):
        within(args, name, "above 0, and finite", lambda x: 0 < x < math.inf, "It is in seconds.")
    within(args, "sglang_concurrency", "1 or more", lambda x: x >= 1, "A few hundred keep a GPU busy.")
    within(args, "sglang_group_port", "0 to 65535", lambda x: 0 <= x <= 65535, "0 takes a free port.")
