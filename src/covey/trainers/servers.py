"""Inference servers of a run, built from its config: addresses, keys, deadlines, and how weights reach them.

To add a make of server, write its dialect and transport (`covey.rollout.engines.remote`) and a function like
`vllm_servers`. Not here: which engine a run samples with (`covey.trainers.engines`), or when weights are sent.
"""

import os
from typing import Any

from covey.policy.loading import end_token_ids
from covey.rollout.engines.remote.dialect import Dialect, WeightTransport
from covey.rollout.engines.remote.engine import RemoteEngine
from covey.rollout.engines.remote.server import Server
from covey.rollout.engines.remote.vllm import VllmDialect
from covey.rollout.engines.remote.vllm_transports import VllmWeights


def vllm_servers(args: Any, model: Any, tokenizer: Any, accelerator: Any, context: int | None) -> RemoteEngine:
    """Samples from vLLM servers, which are looked at here: a wrong one ends the run before it begins.

    Raises:
        ValueError: `generation_kwargs` holds what requests decide themselves.
        ServerRefused: a server is not one that this run can sample from.
        NoServerLeft: one is not up within `vllm_server_timeout`.
    """
    api_key = args.vllm_server_api_key or os.environ.get("VLLM_API_KEY") or None
    dialect = VllmDialect(temperature=args.temperature, extra=generation_extras(args), vocab_size=vocabulary_of(model))
    transport = VllmWeights(
        way=args.vllm_weight_transfer,
        port=args.vllm_group_port,
        folder=args.vllm_weight_folder,
        bucket_bytes=args.vllm_weight_bucket << 20,
    )
    return remote_engine(
        [Server(url, api_key) for url in args.vllm_urls],
        dialect,
        transport,
        model,
        tokenizer,
        accelerator,
        context,
        timeout=args.vllm_server_timeout,
        request_timeout=args.vllm_server_request_timeout,
        sync_timeout=args.vllm_server_sync_timeout,
        concurrency=args.vllm_server_concurrency,
        sleeps=args.vllm_enable_sleep_mode,
        resend=accelerator.num_processes == 1 and args.max_staleness == 0,
    )


def remote_engine(
    servers: list[Server],
    dialect: Dialect,
    transport: WeightTransport,
    model: Any,
    tokenizer: Any,
    accelerator: Any,
    context: int | None,
    **settings: Any,
) -> RemoteEngine:
    """The engine over servers of any make.

    Raises:
        ValueError: several processes would put the same servers to sleep.
    """
    if settings.get("sleeps") and accelerator.num_processes > 1:
        raise ValueError(
            "vllm_enable_sleep_mode=True with vllm_mode='server' and several processes: one of them would put a server"
            " to sleep while others still sample from it. Leave it False, or train on one process."
        )
    return RemoteEngine(
        servers,
        dialect,
        transport,
        ends=frozenset(end_token_ids(model, tokenizer)),
        vocab_size=vocabulary_of(model),
        max_context=context,
        model_name=getattr(model.config, "_name_or_path", None) or None,
        **settings,
    )


def generation_extras(args: Any) -> dict[str, Any]:
    """What requests hold beside the settings that every engine knows."""
    extra = dict(args.generation_kwargs or {})
    if args.vllm_structured_outputs_regex is not None and args.use_vllm and args.vllm_mode == "server":
        if "structured_outputs" in extra:
            raise ValueError(
                "generation_kwargs['structured_outputs'] and vllm_structured_outputs_regex are both set: one of the two"
                " shapes completions. Leave the other out."
            )
        extra["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    return extra


def vocabulary_of(model: Any) -> int:
    """Tokens that the model embeds."""
    return int(model.get_input_embeddings().weight.shape[0])
