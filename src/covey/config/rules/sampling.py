"""Rules about sampling: its settings, the choice of prompts, reuse of completions, async rollouts, tools."""

from typing import TYPE_CHECKING

from covey.config.messages import closest, ignored, warn

if TYPE_CHECKING:
    from covey.config.base import OnlineConfig

SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "num_return_sequences": "num_generations",
    "n": "num_generations",
    "do_sample": "temperature",
    "cache_implementation": "cache_implementation",
}
"""Keys that `generation_kwargs` may not hold, and the field to use instead."""

REUSE = ("exact", "lenient")
"""Kinds of reuse of earlier completions."""


def generation_kwargs_repeat_no_field(args: "OnlineConfig") -> None:
    """Each sampling setting has one home."""
    assert not isinstance(args.generation_kwargs, str), "parsed at construction"
    for key in args.generation_kwargs or {}:
        if key in SAMPLING_KEYS:
            raise ValueError(f"generation_kwargs may not hold {key!r}: set the field `{SAMPLING_KEYS[key]}` instead.")


def prompt_options_are_read(args: "OnlineConfig") -> None:
    """Options of dynamic sampling and of difficulty need them."""
    if not args.dynamic_sample:
        ignored(args, ["max_resample_times"], "dynamic_sample is False")
    if args.prompt_sampler != "difficulty":
        ignored(args, ["difficulty_floor"], f"prompt_sampler is {args.prompt_sampler!r}")


def dataloader_workers_can_read_ahead(args: "OnlineConfig") -> None:
    """Dataloader workers need to know which prompts come next (for streams: `covey.data.sampler.train_loader`)."""
    if args.prompt_sampler == "difficulty":
        because = "with prompt_sampler='difficulty' the prompts of a rollout batch are chosen, and read, when it begins"
        ignored(args, ["dataloader_num_workers"], because)
    elif args.max_staleness:
        because = f"with max_staleness={args.max_staleness} the prompts of a rollout batch are read when it is sampled"
        ignored(args, ["dataloader_num_workers"], because)


def reuse_is_possible(args: "OnlineConfig") -> None:
    """Drafts can be checked: the kind is known, the engine is the built-in one and tokens are independent."""
    kind = args.speculative_reuse
    if kind is None:
        return
    if kind not in REUSE:
        raise ValueError(
            f"speculative_reuse={kind!r} is not known; choose one of: {', '.join(REUSE)}; unset, every completion is"
            f" decoded from its first token.{closest(kind, REUSE)}"
        )
    for engine in ("use_vllm", "use_sglang"):
        if getattr(args, engine):
            raise ValueError(
                f"speculative_reuse={kind!r} with {engine}=True: only the built-in engine can check earlier"
                " completions. Leave one of the two out."
            )
    if args.repetition_penalty != 1.0:
        raise ValueError(
            f"speculative_reuse={kind!r} with repetition_penalty={args.repetition_penalty}: the penalty makes tokens"
            " depend on which came before, so earlier completions cannot be checked in one pass. Leave one of the"
            " two out."
        )


def reuse_has_an_effect(args: "OnlineConfig") -> None:
    """Options of reuse are read, and prompts come again."""
    if args.speculative_reuse is None:
        ignored(args, ["speculative_max_tokens"], "speculative_reuse is not set")
    if args.speculative_reuse != "lenient":
        ignored(args, ["speculative_lenience"], "only speculative_reuse='lenient' reads it")
    once = args.prompt_sampler == "uniform" and not args.dynamic_sample  # else a prompt may come twice in an epoch
    if once and args.max_steps <= 0 and args.num_train_epochs <= 1:
        because = f"with num_train_epochs={args.num_train_epochs:g} no prompt comes a second time"
        ignored(args, ["speculative_reuse"], because)


def async_rollouts_have_an_engine(args: "OnlineConfig") -> None:
    """The engine that samples while the policy trains runs elsewhere. The trainer checks the engine itself."""
    if not args.max_staleness:
        return
    if args.use_vllm and args.vllm_mode == "colocate":
        raise ValueError(
            f"max_staleness={args.max_staleness} with vllm_mode='colocate': vLLM in the trainer's process samples on"
            " the devices that train, so the two take turns. Set vllm_mode='server', or max_staleness=0."
        )
    if args.use_transformers_continuous_batching:
        raise ValueError(
            f"max_staleness={args.max_staleness} with use_transformers_continuous_batching=True: it samples with the"
            " very weights that are trained. Sample with a server, or set max_staleness=0."
        )
    if args.speculative_reuse is not None:
        raise ValueError(
            f"max_staleness={args.max_staleness} with speculative_reuse={args.speculative_reuse!r}: only the built-in"
            " engine can check earlier completions, and it cannot sample while the policy trains. Leave one of the two"
            " out."
        )


def stale_samples_are_corrected(args: "OnlineConfig") -> None:
    """Samples of older weights are corrected for, and their servers stay awake."""
    if not args.max_staleness:
        return
    if not args.vllm_importance_sampling_correction:
        warn(
            f"max_staleness={args.max_staleness} with vllm_importance_sampling_correction=False: completions of older"
            " weights are trained on as if they were fresh, which biases the gradient. Leave the correction on."
        )
    if args.use_vllm and args.vllm_mode == "server" and args.vllm_enable_sleep_mode:
        warn(
            f"vllm_enable_sleep_mode=True with max_staleness={args.max_staleness}: the servers sample while the policy"
            " trains, so they hardly sleep. Leave it False, or set max_staleness=0."
        )


def tool_parser_is_known(args: "OnlineConfig") -> None:
    """The notation of tool calls has a parser."""
    if args.tool_parser is None:
        return
    from covey.rollout.tools.parsers import TOOL_PARSERS

    if args.tool_parser not in TOOL_PARSERS:
        raise ValueError(
            f"tool_parser={args.tool_parser!r} is not known; choose one of: {', '.join(TOOL_PARSERS)}."
            f"{closest(args.tool_parser, TOOL_PARSERS)} To add your own, register it in"
            " covey.rollout.tools.parsers.TOOL_PARSERS."
        )


RULES = (
    generation_kwargs_repeat_no_field,
    prompt_options_are_read,
    dataloader_workers_can_read_ahead,
    reuse_is_possible,
    reuse_has_an_effect,
    async_rollouts_have_an_engine,
    stale_samples_are_corrected,
    tool_parser_is_known,
)
