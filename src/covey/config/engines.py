"""Fields and rules about vLLM, SGLang, and the numerical mismatch of engines with the trainer."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from covey.config.fields import Args, describe_fields, limited
from covey.config.hardware import by_deepspeed, by_fsdp
from covey.config.messages import ignored, is_set
from covey.core.findings import Finding

SECONDS: dict[str, Any] = {"gt": 0, "le": 10**9, "advice": "It is in seconds."}
REQUESTS: dict[str, Any] = {"ge": 1, "advice": "A few hundred keep a GPU busy."}


@dataclass
class VllmFields:
    """Sampling with vLLM."""

    use_vllm: bool = False
    """Sample with vLLM rather than with the built-in engine."""
    vllm_mode: str = limited("colocate", choices=("colocate", "server"))
    """`colocate`: vLLM shares the training devices; `server`: it runs as a server of its own."""
    vllm_model_impl: str = limited("vllm", choices=("vllm", "transformers"))
    """Model code that vLLM runs: `vllm` for its own, `transformers` for transformers'."""
    vllm_enable_sleep_mode: bool = False
    """Release vLLM's memory while the policy is trained; waking up takes time. In server mode only on one process."""
    vllm_sleep_level: int = limited(
        1,
        ge=1,
        le=2,
        advice="1 keeps vLLM's weights in host memory, 2 discards them. Not to sleep at all is "
        "vllm_enable_sleep_mode=False.",
    )
    """Level of vLLM's sleep: 1 keeps its weights in host memory; 2 discards them, and the policy's are sent at every
    waking."""
    vllm_structured_outputs_regex: str | None = None
    """Regular expression that every completion must match."""
    vllm_server_base_url: str | None = None
    """URL of the vLLM server, as in http://localhost:8000, or of several: a list, or with commas between them. Replaces
    host and port."""
    server_pool_file: str | None = None
    """File with the URLs of vLLM or SGLang servers, one a line, instead of their other addresses. Read again before
    each rollout batch: servers join and leave during a run."""
    vllm_server_host: str = "0.0.0.0"
    """Host of the vLLM server; 0.0.0.0 means this machine."""
    vllm_server_port: int = limited(8000, ge=1, le=65535, advice="vLLM listens at 8000 by default.")
    """Port of the vLLM server."""
    vllm_server_timeout: float = limited(240.0, **SECONDS)
    """Seconds to wait for vLLM servers to be up: at the start, and again when all of them have failed."""
    vllm_server_request_timeout: float = limited(800.0, **SECONDS)
    """Seconds that one prompt's completions may take at a vLLM server before another server is asked."""
    vllm_server_sync_timeout: float = limited(600.0, **SECONDS)
    """Seconds that sending the new weights to vLLM servers may take."""
    vllm_server_concurrency: int = limited(512, **REQUESTS)
    """Most completions in flight at once at one vLLM server."""
    vllm_server_api_key: str | None = None
    """Key of the vLLM servers. Unset: the environment variable VLLM_API_KEY, where no log shows it."""
    vllm_group_port: int = 51216
    """Port over which weights are sent to the vLLM server."""
    vllm_weight_transfer: str = limited("auto", choices=("auto", "group", "disk"))
    """Transfer of weights to vLLM servers: over a `group` of processes (gloo, NCCL), or as files on `disk`. `auto`: the
    group if the servers can, else files."""
    vllm_weight_folder: str | None = None
    """Folder through which weights reach vLLM servers as files; trainer and servers must see it under the same name.
    Unset: a temporary one, for servers on this machine."""
    vllm_weight_bucket: int = limited(128, ge=1)
    """MiB of weights sent at once over a group."""
    vllm_weight_differences: bool = False
    """Send vLLM servers only the numbers that changed since the last update, bit for bit, wherever that takes fewer
    bytes. The trainer and each server then hold a copy of the weights in host memory. Needs the group."""
    vllm_lora_sync: str = limited("auto", choices=("auto", "adapter", "merged"))
    """Transfer of a LoRA model to vLLM: the `adapter` alone (small), or `merged` weights. `auto`: the adapter where it
    and vLLM allow that."""
    vllm_gpu_memory_utilization: float | str | None = 0.3
    """Share of a GPU's memory that vLLM may take, above 0 and at most 1 (colocate mode). `auto` and unset: computed
    from the model, the batch sizes and the GPU, as `covey explain` shows."""
    vllm_max_model_length: int | None = limited(None, ge=1)
    """Context length of vLLM, in tokens. Unset: the model's own, or what memory allows (colocate mode)."""
    vllm_tensor_parallel_size: int = limited(1, ge=1)
    """GPUs over which vLLM splits the model (colocate mode)."""
    vllm_engine_kwargs: dict | str | None = None
    """Further arguments of vLLM's engine, as in `vllm.EngineArgs` (a dict or JSON; colocate mode)."""
    offload_model: bool = False
    """Move the policy to host memory while vLLM samples (colocate mode, with vllm_enable_sleep_mode)."""
    offload_optimizer: bool = False
    """Move the optimizer's state to host memory while vLLM samples (colocate mode, with vllm_enable_sleep_mode)."""
    move_model_batches: int | None = limited(None, ge=1)
    """Batches of layers in which the policy's weights are gathered for vLLM (colocate mode). Fewer are faster and hold
    more in memory at once; unset: one tensor at a time."""


@dataclass
class MismatchFields:
    """The difference between any engine's log-probabilities and the trainer's."""

    vllm_importance_sampling_correction: bool = True
    """Weight each sampled token by trainer probability over engine probability, to correct their numerical mismatch
    (truncated or masked importance sampling). It applies to every engine except the built-in one without
    `engine_dtype`, which hardly needs it: see `correct_built_in_engine`."""
    vllm_importance_sampling_mode: str = limited(
        "sequence_mask", choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    )
    """Ratio per `token` or per `sequence`, and its treatment beyond the bounds: `_truncate` sets it to the bound,
    `_mask` drops the token or sequence from the loss."""
    vllm_importance_sampling_clip_max: float | None = 3.0
    """Upper bound of that ratio; unset: none."""
    vllm_importance_sampling_clip_min: float | None = None
    """Lower bound of that ratio; unset: none."""
    vllm_importance_sampling_cap: float | None = None
    """Old name of `vllm_importance_sampling_clip_max`; use that one."""
    geometric_mask_min: float | None = None
    """Leave out completions whose trainer-to-engine ratio, in the geometric mean over their tokens, is below this;
    unset: none. It can be combined with any mode, or used alone with `vllm_importance_sampling_correction=False`."""
    geometric_mask_max: float | None = None
    """Leave out completions whose trainer-to-engine ratio, in the geometric mean over their tokens, is above this;
    unset: none."""
    correct_built_in_engine: bool = False
    """Apply that correction to the built-in engine too. It samples with the trained weights themselves, so there is
    only the rounding of half precision to correct."""
    engine_dtype: str | None = limited(
        None,
        choices=("auto", "bfloat16", "int8", "float8"),
        advice="Unset, the engine computes as the trainer does.",
    )
    """Number format to which the engine rounds weights and inputs of linear layers, once per rollout batch: the
    built-in engine, vLLM in this process, or an SGLang server that the run starts. The samples are then corrected for
    the mismatch. `auto`, for the built-in engine only: the fastest format with which a decoding step gets at least 1.2
    times as fast on this machine and log-probs differ by at most 0.05 nats on average, both measured at the start; else
    none. Unset: none."""
    engine_parity: str = limited("raise", choices=("raise", "warn", "off"))
    """When an engine's log-probabilities of the first samples differ from the trainer's by more than rounding explains:
    `raise` ends the run and names the likely cause, `warn` continues, `off` does not compare."""
    routing_replay: str | None = limited(
        None, choices=("R2", "R3"), advice="Unset, every forward pass of a mixture of experts chooses its own experts."
    )
    """Experts with which the loss of a mixture of experts is computed: `R2` replays in updates the experts that the
    trainer chose when it scored the samples (GSPO, arXiv 2507.18071); `R3` replays those that the engine chose, in
    scoring and updates alike (arXiv 2510.11370). The weights of these experts come from the current router. Unset: each
    forward pass chooses."""


@dataclass
class ContinuousBatchingFields:
    """Accepted for scripts that ask for it: the built-in engine batches continuously itself."""

    use_transformers_continuous_batching: bool = False
    """No effect: the built-in engine batches continuously itself, and samples in place of transformers'."""
    transformers_continuous_batching_config: dict | str | None = None
    """No effect; `max_concurrent_completions` bounds the batch of the built-in engine."""
    use_transformers_paged: bool = False
    """Old name of `use_transformers_continuous_batching`; use that one."""


@dataclass
class SglangFields:
    """Sampling with an SGLang server."""

    use_sglang: bool = False
    """Sample with SGLang servers rather than with the built-in engine."""
    sglang_base_url: str | None = None
    """URL of the SGLang server, or of several: a list, or with commas between them. Unset, and without `sglang_device`:
    http://127.0.0.1:30000."""
    sglang_device: str | None = None
    """Without a URL: start an SGLang server on this device, as in `cuda:1`, which the trainer itself must not use."""
    sglang_server_args: dict | str | None = None
    """Further flags of the server that is started (a dict or JSON), as in {"mem_fraction_static": 0.8}."""
    sglang_api_key: str | None = None
    """Key of the SGLang servers. Unset: the environment variable SGLANG_API_KEY, where no log shows it."""
    sglang_server_timeout: float = limited(600.0, **SECONDS)
    """Seconds to wait for SGLang servers to be up: at the start, and again when all of them have failed."""
    sglang_request_timeout: float = limited(800.0, **SECONDS)
    """Seconds that one prompt's completions may take at an SGLang server before another server is asked."""
    sglang_sync_timeout: float = limited(600.0, **SECONDS)
    """Seconds that sending the new weights to SGLang servers may take."""
    sglang_concurrency: int = limited(512, **REQUESTS)
    """Most completions in flight at once at one SGLang server."""
    sglang_weight_transfer: str = limited("auto", choices=("auto", "group", "disk"))
    """Transfer of weights to SGLang servers: `group` broadcasts them, `disk` writes them to `checkpoint_path`. `auto`:
    the group if the servers can, else files."""
    sglang_group_port: int = limited(0, ge=0, le=65535, advice="0 takes a free port.")
    """First port over which weights are broadcast to SGLang servers; each server takes one, counting up. 0: free
    ports."""
    checkpoint_path: str | None = None
    """Folder through which weights reach SGLang servers as files; trainer and servers must see it under the same name.
    Unset: a temporary one, for servers on this machine."""


describe_fields(__name__)

# ---- rules -----------------------------------------------------------------------------------------------------------

OFFLOAD = ("offload_model", "offload_optimizer")
COLOCATED = (
    "vllm_sleep_level",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "vllm_engine_kwargs",
    "vllm_model_impl",
    *OFFLOAD,
    "move_model_batches",
)  # a server has settings of its own for these
ADDRESSES = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
SHARED_WITH_SGLANG = ("vllm_lora_sync", "vllm_structured_outputs_regex")
CORRECTION_OPTIONS = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min"))
SERVER_FORMATS = {"bfloat16": ("dtype", "bfloat16"), "float8": ("quantization", "fp8")}
"""Formats of `engine_dtype` that vLLM and SGLang round to, with their flag and its value."""
GEOMETRIC = ("geometric_mask_min", "geometric_mask_max")
CORRECTION = ("vllm_importance_sampling_correction", *CORRECTION_OPTIONS, "vllm_importance_sampling_cap", *GEOMETRIC)

ENGINE_KEYS = {
    "model": "it is the policy",
    "tokenizer": "it is the policy's",
    "load_format": "weights come from the policy",
    "generation_config": "fields of the config say how to sample",
    "logprobs_mode": "it follows from `temperature`",
    "distributed_executor_backend": "vLLM runs in the trainer's processes",
    "max_model_len": "set the field `vllm_max_model_length`",
    **{
        key: f"set the field `vllm_{key}`"
        for key in ("gpu_memory_utilization", "tensor_parallel_size", "enable_sleep_mode", "model_impl")
    },
    **{key: f"set the field `{key}`" for key in ("trust_remote_code", "seed")},
}
"""Keys that `vllm_engine_kwargs` may not hold, and why."""


def one_engine_samples(args: Args) -> Iterator[Finding]:
    named = [name for name in ("use_vllm", "use_sglang", "use_transformers_continuous_batching") if getattr(args, name)]
    if len(named) > 1:
        evidence = f"{' and '.join(f'{name}=True' for name in named)}: only one engine can sample."
        yield Finding.error("engines-several", evidence, "Keep one of them.")


def engine_options_need_their_engine(args: Args) -> Iterator[Finding]:
    names = [field.name for field in dataclasses.fields(args)]
    if not args.use_vllm:
        read = {*CORRECTION, *(SHARED_WITH_SGLANG if args.use_sglang else ())}
        unread = [name for name in names if name.startswith("vllm_") and name not in read]
        yield from ignored(args, [*unread, *OFFLOAD, "move_model_batches"], "use_vllm is False")
    if not args.use_sglang and not (args.use_vllm and args.vllm_mode == "server"):
        yield from ignored(args, ["server_pool_file"], "no vLLM or SGLang servers are used")
    if not args.use_sglang:
        unread = [name for name in names if name.startswith("sglang_")]
        yield from ignored(args, [*unread, "checkpoint_path"], "use_sglang is False")
    own = "the built-in engine, which batches continuously itself, samples in place of transformers'"
    yield from ignored(args, ["use_transformers_continuous_batching"], own)
    yield from ignored(
        args, ["transformers_continuous_batching_config"], f"{own}; max_concurrent_completions bounds its batch"
    )
    if args.samples_elsewhere:
        yield from ignored(args, ["ds3_gather_for_generation"], "another engine samples, from weights of its own")
    elif not (args.deepspeed or args.fsdp or by_deepspeed() or by_fsdp()):
        yield from ignored(args, ["ds3_gather_for_generation"], "neither FSDP nor DeepSpeed is in use")
    yield from ignored(args, ["cache_implementation"], "the built-in engine manages its own key-value cache")


def vllm_settings_are_read(args: Args) -> Iterator[Finding]:
    """Settings of one mode of vLLM need that mode, and settings of its sleep need `vllm_enable_sleep_mode`."""
    if not args.use_vllm:
        return
    if args.vllm_mode == "server":
        yield from ignored(args, COLOCATED, "vllm_mode is 'server', and the server has settings of its own")
        if args.server_pool_file:
            yield from ignored(args, ADDRESSES, "server_pool_file lists the servers")
        elif args.vllm_server_base_url:
            yield from ignored(args, ADDRESSES[1:], "vllm_server_base_url replaces it")
        if args.vllm_weight_transfer == "disk":
            why = "vllm_weight_transfer is 'disk', and files hold whole tensors"
            yield from ignored(args, ["vllm_weight_differences"], why)
        yield from ignored(
            args, ["max_concurrent_completions"], "it is for the built-in engine; set vllm_server_concurrency"
        )
        return
    server = ("vllm_server_", "vllm_group_", "vllm_weight_")
    fields = [field.name for field in dataclasses.fields(args) if field.name.startswith(server)]
    yield from ignored(args, fields, f"vllm_mode is {args.vllm_mode!r}, not 'server'")
    if not args.vllm_enable_sleep_mode:
        yield from ignored(args, ["vllm_sleep_level"], "vllm_enable_sleep_mode is False")
        yield from ignored(
            args, OFFLOAD, "vllm_enable_sleep_mode is False, so vLLM holds its memory already and nothing is moved"
        )


def engine_kwargs_repeat_no_field(args: Args) -> Iterator[Finding]:
    assert not isinstance(args.vllm_engine_kwargs, str), "parsed at construction"
    for key in args.vllm_engine_kwargs or {}:
        if key in ENGINE_KEYS:
            evidence = f"vllm_engine_kwargs may not hold {key!r}: {ENGINE_KEYS[key]}."
            yield Finding.error("setting-elsewhere", evidence)


def sglang_settings_are_read(args: Args) -> Iterator[Finding]:
    if not args.use_sglang:
        return
    if args.server_pool_file:
        addresses = ["sglang_base_url", "sglang_device", "sglang_server_args"]
        yield from ignored(args, addresses, "server_pool_file lists servers that run already")
    elif args.sglang_base_url:
        yield from ignored(
            args, ["sglang_device", "sglang_server_args"], "sglang_base_url names servers that run already"
        )
    elif not args.sglang_device:
        yield from ignored(args, ["sglang_server_args"], "no server is started: sglang_device is not set")
    yield from ignored(args, ["max_concurrent_completions"], "it is for the built-in engine; set sglang_concurrency")


def correction_is_read(args: Args) -> Iterator[Finding]:
    """The built-in engine is corrected where it rounds or if asked to, and options of the correction need that."""
    if args.samples_elsewhere:
        yield from ignored(args, ["correct_built_in_engine"], "another engine samples, which is corrected anyway")
    elif args.rounds_engine and args.engine_dtype != "auto":
        yield from ignored(
            args, ["correct_built_in_engine"], "an engine that rounds is corrected anyway (engine_dtype)"
        )
    elif not args.correct_built_in_engine and not args.rounds_engine:
        same = "the built-in engine samples with the trainer's own weights and precision"
        yield from ignored(args, CORRECTION, f"{same}; correct_built_in_engine=True corrects its rounding all the same")
        return
    if not args.vllm_importance_sampling_correction:
        names = [*CORRECTION_OPTIONS, *["correct_built_in_engine"] * (not args.rejects_completions)]
        yield from ignored(args, names, "vllm_importance_sampling_correction is False")


def engine_dtype_is_read(args: Args) -> Iterator[Finding]:
    """Engines that the run starts take the format; running servers have a format of their own."""
    if args.engine_dtype is None:
        return
    given = f"engine_dtype={args.engine_dtype!r}"
    started = {
        "use_vllm": args.vllm_mode == "colocate",
        "use_sglang": bool(args.sglang_device and not (args.sglang_urls or args.server_pool_file)),
    }
    for engine, starts in started.items():
        if not getattr(args, engine):
            continue
        flags = " or ".join(f"--{key} {value}" for key, value in SERVER_FORMATS.values())
        if not starts:
            because = f"servers round by their own flags: start them with {flags}"
            yield from ignored(args, ["engine_dtype"], because)
        elif args.engine_dtype not in SERVER_FORMATS:
            yield Finding.error(
                "engine-dtype",
                f"{given} with {engine}=True: this engine rounds weights when they are loaded to one of"
                f" {', '.join(SERVER_FORMATS)}.",
                "Choose one of these, or leave engine_dtype unset.",
            )
    if args.samples_elsewhere and not (args.use_vllm or args.use_sglang):
        yield from ignored(args, ["engine_dtype"], "it is for the built-in engine, which cannot sample ahead")
    elif args.bf16 and not args.samples_elsewhere and args.engine_dtype == "bfloat16":
        yield from ignored(args, ["engine_dtype"], "bf16 is True, so the policy computes in bfloat16 already")
    elif args.rounds_engine and not args.vllm_importance_sampling_correction:
        yield Finding.warning(
            "engine-dtype-uncorrected",
            f"{given} with vllm_importance_sampling_correction=False: samples of the rounded policy are trained on as"
            " if the policy itself had sampled them, which biases the gradient, and the mismatch is not logged.",
            "Leave the correction on.",
        )


def routes_can_be_replayed(args: Args) -> Iterator[Finding]:
    given = f"routing_replay={args.routing_replay!r}"
    if args.routing_replay is None:
        return
    if args.torch_compile:
        yield Finding.error(
            "routing-replay",
            f"{given} with torch_compile=True: the routers' forward passes are answered while they run, and a compiled"
            " model does not run them.",
            "Leave one of the two out.",
        )
    if args.routing_replay == "R3" and args.use_vllm and args.vllm_mode == "colocate":
        yield Finding.error(
            "routing-replay",
            f"{given} with vllm_mode='colocate': experts are read from the answers of servers.",
            "Set vllm_mode='server' and start vLLM with --enable-return-routed-experts, or sample with the built-in"
            " engine.",
        )
    if args.routing_replay == "R2" and args.algebra().on_policy:
        yield from ignored(
            args,
            ["routing_replay"],
            "each rollout batch has one update, which begins with the weights that scored it and chooses the same"
            " experts; 'R2' needs several updates per rollout batch, 'R3' replays the engine's experts",
        )


def correction_bounds_enclose_one(args: Args) -> Iterator[Finding]:
    advice = {"vllm_importance_sampling_clip": "0.5 and 3 are usual.", "geometric_mask": "0.99 and 1.01 are usual."}
    for name, usual in advice.items():
        low, high = getattr(args, f"{name}_min"), getattr(args, f"{name}_max")
        if not 0 <= (low or 0.0) <= 1 or (high is not None and not high >= 1):
            yield Finding.error(
                "correction-bounds",
                f"{name}_min={low} and {name}_max={high} must lie on either side of 1, the ratio where engine and"
                " trainer agree: the first between 0 and 1, the second 1 or more, or either of them unset.",
                usual,
            )


def vespo_is_corrected_by_token(args: Args) -> Iterator[Finding]:
    mode, used = args.vllm_importance_sampling_mode, args.resolved_mismatch_mode
    if args.corrects_mismatch and mode != used and is_set(args, "vllm_importance_sampling_mode"):
        yield Finding.warning(
            "correction-level",
            f"vllm_importance_sampling_mode={mode!r} with loss_type={args.loss_type!r}: it multiplies the ratios of a"
            f" sequence's tokens itself, so {used!r} is used.",
        )
