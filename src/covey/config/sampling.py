"""Fields and rules about sampling: the distribution, reuse, async rollouts, tools and the choice of prompts."""

from collections.abc import Iterator
from dataclasses import dataclass

from covey.config.fields import Args, Limits, describe_fields, limited
from covey.config.messages import ignored
from covey.core.findings import Finding


@dataclass
class GenerationFields:
    """The sampling distribution and the built-in engine."""

    max_completion_length: int | None = limited(512, ge=1)
    """Most tokens of a completion; a longer one is truncated. Unset: until the model's context is full."""
    temperature: float = limited(
        1.0,
        ge=1e-5,  # logits divided by less overflow
        finite=True,
        advice="At 0 all completions of a prompt are equal and every advantage is 0; 1.0 is usual.",
    )
    """Divides the logits, when sampling and when computing log-probabilities alike. Higher is more random."""
    top_p: float = limited(1.0, gt=0, le=1, advice="1.0 keeps all tokens.")
    """Sample from the smallest set of tokens whose probabilities reach this; 1 keeps all."""
    top_k: int = limited(0, ge=0, advice="0 keeps all tokens.")
    """Sample from this many most probable tokens; 0 keeps all."""
    min_p: float | None = limited(None, ge=0, le=1, advice="Unset or 0 keeps all tokens.")
    """Sample from tokens whose probability is at least this share of the most probable token's; unset keeps all."""
    repetition_penalty: float = limited(1.0, gt=0, finite=True, advice="1.0 changes nothing; 1.05 to 1.2 are usual.")
    """Above 1, tokens already in the prompt or completion become less probable; 1 changes nothing."""
    keep_sampling_mask: bool = False
    """Train the distribution that was sampled from: log-probabilities of the policy, its earlier versions and the
    reference are over the tokens that top_p, top_k and min_p kept, after the repetition penalty (DeepSeek-V3.2, arXiv
    2512.02556, section 3.1). Off: over the whole vocabulary. A small `top_k` bounds the memory for kept tokens."""
    generation_kwargs: dict | str | None = None
    """Further sampling settings for the engine (a dict or JSON), such as `{"stop": ["</answer>"]}`. Settings with a
    field of their own, such as temperature, belong there."""
    chat_template_kwargs: dict | str | None = None
    """Keyword arguments of the chat template (a dict or JSON). Keys in a dataset column `chat_template_kwargs` have
    precedence, row by row."""
    allow_control_tokens: bool = False
    """Parse control tokens such as <|im_end|> in messages of prompts, tools and environments as control tokens. Off:
    they are read as plain text, so that data cannot end a turn or begin another. Prompts that are text, not messages,
    may always contain them."""
    cache_implementation: str | None = None
    """Kind of key-value cache of transformers' `generate`. The built-in engine manages its own."""
    max_concurrent_completions: int = limited(64, ge=1)
    """Most completions that the built-in engine decodes at once; the rest wait. Bounds the key-value cache."""


@dataclass
class SpeculationFields:
    """Completions of earlier epochs as drafts."""

    speculative_reuse: str | None = limited(
        None, choices=("exact", "lenient"), advice="Unset, every completion is decoded from its first token."
    )
    """When a prompt comes again, check its last completions in one forward pass and decode only from the first token
    that is rejected. `exact`: the result is the one that sampling with the same seed gives, and a prompt keeps its
    seeds from epoch to epoch; `lenient`: stale tokens may stay. Unset: every completion is decoded token by token."""
    speculative_lenience: float = limited(1.65, gt=0, finite=True, advice="1 to 2 are usual.")
    """With `speculative_reuse=lenient`, a draft token stays with probability min(1, this * p_now / p_then). A larger
    number reuses more and is further off-policy."""
    speculative_max_tokens: int = limited(50_000_000, ge=1)
    """Most completion tokens that a process keeps as drafts, 4 bytes each (8 with `lenient`); the oldest are dropped
    first."""


@dataclass
class AgentFields:
    """Tools, and sampling that overlaps training."""

    max_tool_calling_iterations: int | None = limited(
        None, ge=0, advice="Leave it unset for as many as the model asks for."
    )
    """Most rounds of tool calls in one rollout; unset: until the model stops calling."""
    tool_timeout: float = limited(60.0, gt=0, le=10**9, advice="It is in seconds.")
    """Seconds that one call of a tool or of an environment may take. A late call fails; its rollout continues."""
    tool_parser: str | None = None
    """Notation of the model's calls, such as `hermes`, `llama3` or `json`. Unset: recognised from the chat template."""
    rollout_timeout: float = limited(3600.0, gt=0, le=10**9, advice="It is in seconds.")
    """Seconds that one rollout with tools, an environment or a function of your own may take; a late one counts as
    failed. For a `rollout_func(prompts, trainer)`, seconds for all its rollouts together."""
    unstable_chat_template: str = limited("raise", choices=("raise", "keep", "rewrite"))
    """Treatment of a chat template that renders earlier turns differently once later ones follow: `raise` refuses it;
    `keep` trains on the turns as they were sampled; `rewrite` changes the template, and the one that is saved, so that
    it keeps the thinking of all turns."""
    max_turn_length: int | None = limited(None, ge=1, advice="Unset, max_completion_length alone bounds a turn.")
    """Most tokens that one turn of a rollout with tools, an environment, an agent or a function of your own may have.
    Tools and environments get no turn that was cut off: the rollout ends."""
    trained_turns: str = limited("all", choices=("all", "last"))
    """Turns of such a rollout that are trained on: `all`, or only the `last`, with the earlier ones as its context."""
    rollouts_per_game: int = limited(1, ge=1, advice="It is the number of trained seats, as 2 for chess.")
    """Rollouts of one game that a `rollout_func(row, engine, n)` plays: it is called for each game, with n of this
    size. A game is never cut between processes, and fails alone. 1: the function plays all rollouts of a prompt."""
    opponents_kept: int = limited(4, ge=1)
    """With a seat "policy:n": number of earlier copies of the policy that are kept as opponents. Each game draws
    one."""
    max_staleness: int = limited(0, ge=0, advice="0 samples and trains by turns, 1 samples one step ahead.")
    """Most optimizer steps by which the sampling weights may lag behind the trained ones. Above 0, later rollout
    batches are sampled while one is trained on (async rollouts): 1 samples one step ahead. 0 samples and trains in
    turn. Needs an engine with weights of its own, such as a server."""


@dataclass
class PromptFields:
    """Prompts: text or messages, and their choice by the rewards that they have earned."""

    prompts_as_messages: bool | None = None
    """Make each text prompt a user message, so that the model's chat template is applied and rewards see messages.
    False: text is passed to the model as it is. Unset: the same, with a warning where the tokenizer has a chat
    template."""
    dynamic_sample: bool = False
    """Replace groups without a signal (all advantages 0) by groups of further prompts before training (dynamic
    sampling, DAPO, arXiv 2503.14476). The same as the gate `signal`."""
    gates: dict | str | None = None
    """Gates that a finished group must pass to be trained on, with their settings (a dict or JSON): `signal` (true),
    `reward_range` (bounds of its mean reward: `above`, `from`, `below`, `to`), `advantage_range` (rejects groups whose
    advantages all lie in [min, max]), `max_truncated` (share of completions that are cut off), or any other name with a
    function of the group's facts as path/to/file.py:name. A group that is rejected is replaced by another prompt's."""
    max_resample_times: int = limited(3, ge=0, advice="0 never refills; 3 is usual.")
    """With `dynamic_sample` or `gates`, most rounds of resampling. Groups still rejected after them are trained on as
    they were first sampled."""
    prompt_sampler: dict | str | None = "uniform"
    """`uniform`: an epoch samples from every prompt once. `difficulty`: prompts of intermediate difficulty, by their
    rewards so far, come more often than those always or never solved. `{"pools": {"hard": [0.25, 0.2], ...}}`: each
    pool has the prompts up to a largest mean reward, and a weight. `{"order": column}`: every epoch goes from the
    smallest value of a column to the largest. Or path/to/file.py:name, a function of means, squares, counts and step
    that gives each row its probability."""
    difficulty_floor: float = limited(
        0.1,
        ge=0.01,  # below it, a dataset of solved prompts would be gone through a hundred times for one sample
        le=1,
        advice="At 0 a prompt that failed once would never come again; at 1 all prompts come alike. 0.1 is usual.",
    )
    """With prompt_sampler `difficulty`, how often a prompt that is always or never solved comes, relative to one that
    is solved half of the time."""
    resume_sources: bool = False
    """Let a resumed run have data sources that its checkpoint does not have; they begin with their first epoch."""


describe_fields(__name__)

# ---- rules -----------------------------------------------------------------------------------------------------------

SAMPLING_KEYS = {
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations"),
    "cache_implementation": "cache_implementation",
    "max_length": "max_completion_length",
    "do_sample": "temperature",
}
"""Keys that `generation_kwargs` may not hold, and the field to use instead."""


IDLE_KEYS = {
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), "completions are not padded"),
    **dict.fromkeys(("use_cache", "return_dict_in_generate"), "every engine does so"),
    **dict.fromkeys(("output_scores", "output_logits"), "engines return tokens and their log-probabilities alone"),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), "engines return tokens and log-probabilities alone"),
    **dict.fromkeys(("num_beams", "num_beam_groups", "early_stopping"), "completions are sampled one by one"),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), "texts are decoded from the tokens here"),
    "do_sample": "completions are sampled",
}
"""Settings of transformers' `generate` and of servers that have no effect here, and why."""
IDLE_AT = {
    **dict.fromkeys(("use_cache", "return_dict_in_generate", "do_sample"), True),
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    "early_stopping": False,
}
"""The value at which a key of `IDLE_KEYS` changes nothing, for keys that change something at others."""


def generation_kwargs_repeat_no_field(args: Args) -> Iterator[Finding]:
    assert not isinstance(args.generation_kwargs, str), "parsed at construction"
    for key, value in (args.generation_kwargs or {}).items():
        if key in SAMPLING_KEYS and (key, value) != ("do_sample", True):
            evidence = f"generation_kwargs may not hold {key!r}: set the field `{SAMPLING_KEYS[key]}` instead."
            yield Finding.error("setting-elsewhere", evidence)


def sampling_masks_can_be_kept(args: Args) -> Iterator[Finding]:
    if not args.keep_sampling_mask:
        return
    if args.use_vllm or args.use_sglang:
        yield Finding.error(
            "sampling-mask",
            f"keep_sampling_mask=True with {'use_vllm' if args.use_vllm else 'use_sglang'}=True: only the built-in"
            " engine returns which tokens it sampled from.",
            "Leave one of the two out; at top_p=1, top_k=0 and without min_p and repetition_penalty the server samples"
            " from all tokens, as the trainer scores them.",
        )
    elif args.speculative_reuse == "lenient":
        yield Finding.error(
            "sampling-mask",
            "keep_sampling_mask=True with speculative_reuse='lenient': a stale token may stay that the policy would not"
            " sample now, and its probability would be 0.",
            "Set speculative_reuse='exact', or leave one of the two out.",
        )
    elif args.top_p == 1 and not args.top_k and not args.min_p and args.repetition_penalty == 1:
        yield from ignored(args, ["keep_sampling_mask"], "top_p, top_k, min_p and repetition_penalty change nothing")


def prompt_options_are_read(args: Args) -> Iterator[Finding]:
    if args.prompt_sampler != "uniform":
        shown = f"prompt_sampler={args.prompt_sampler!r}"
        because = f"with {shown} the prompts of a rollout batch are chosen, and read, when it begins"
        yield from ignored(args, ["dataloader_num_workers"], because)
    elif args.max_staleness:  # workers need to know which prompts come next (streams: `train_loader`)
        because = f"with max_staleness={args.max_staleness} the prompts of a rollout batch are read when it is sampled"
        yield from ignored(args, ["dataloader_num_workers"], because)


def reuse_is_possible(args: Args) -> Iterator[Finding]:
    kind = args.speculative_reuse
    if kind is None:
        return
    for engine in ("use_vllm", "use_sglang"):
        if getattr(args, engine):
            yield Finding.error(
                "draft-reuse",
                f"speculative_reuse={kind!r} with {engine}=True: only the built-in engine can check earlier"
                " completions.",
                "Leave one of the two out.",
            )
    if args.repetition_penalty != 1.0:
        yield Finding.error(
            "draft-reuse",
            f"speculative_reuse={kind!r} with repetition_penalty={args.repetition_penalty}: the penalty makes tokens"
            " depend on which came before, so earlier completions cannot be checked in one forward pass.",
            "Leave one of the two out.",
        )


def reuse_has_an_effect(args: Args) -> Iterator[Finding]:
    if args.speculative_reuse is None:
        yield from ignored(args, ["speculative_max_tokens"], "speculative_reuse is not set")
    if args.speculative_reuse != "lenient":
        yield from ignored(args, ["speculative_lenience"], "only speculative_reuse='lenient' reads it")
    once = args.prompt_sampler == "uniform" and not args.dynamic_sample and not args.gates  # else twice in an epoch
    if once and args.max_steps <= 0 and args.num_train_epochs <= 1:
        because = f"with num_train_epochs={args.num_train_epochs:g} no prompt comes a second time"
        yield from ignored(args, ["speculative_reuse"], because)


def async_rollouts_have_an_engine(args: Args) -> Iterator[Finding]:
    """The trainer checks the engine itself."""
    if not args.max_staleness:
        return
    if args.use_vllm and args.vllm_mode == "colocate":
        yield Finding.error(
            "async-sampling",
            f"max_staleness={args.max_staleness} with vllm_mode='colocate': vLLM in the trainer's process samples on"
            " the devices that train, so the two take turns.",
            "Set vllm_mode='server', or max_staleness=0.",
        )
    if args.use_transformers_continuous_batching:
        yield Finding.error(
            "async-sampling",
            f"max_staleness={args.max_staleness} with use_transformers_continuous_batching=True: it samples with the"
            " very weights that are trained.",
            "Sample with a server, or set max_staleness=0.",
        )
    if args.speculative_reuse is not None:
        yield Finding.error(
            "async-sampling",
            f"max_staleness={args.max_staleness} with speculative_reuse={args.speculative_reuse!r}: only the built-in"
            " engine can check earlier completions, and it cannot sample while the policy trains.",
            "Leave one of the two out.",
        )


def stale_samples_are_corrected(args: Args) -> Iterator[Finding]:
    if not args.max_staleness:
        return
    if not (args.vllm_importance_sampling_correction or args.rejects_completions):
        yield Finding.warning(
            "async-uncorrected",
            f"max_staleness={args.max_staleness} with vllm_importance_sampling_correction=False: completions of older"
            " weights are trained on as if they were fresh, which biases the gradient.",
            "Leave the correction on.",
        )
    if args.use_vllm and args.vllm_mode == "server" and args.vllm_enable_sleep_mode:
        yield Finding.warning(
            "async-sleep",
            f"vllm_enable_sleep_mode=True with max_staleness={args.max_staleness}: the servers sample while the policy"
            " trains, so they hardly sleep.",
            "Leave it False, or set max_staleness=0.",
        )


def tool_parser_is_known(args: Args) -> Iterator[Finding]:
    if args.tool_parser is None:
        return
    from covey.rollout.tools.parsers import TOOL_PARSERS

    advice = "To add your own, register it in covey.rollout.tools.parsers.TOOL_PARSERS."
    yield from Limits(choices=tuple(TOOL_PARSERS), advice=advice).check("tool_parser", args.tool_parser)
