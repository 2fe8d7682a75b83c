"""Fields about sampling: the distribution, the built-in engine, tools and the choice of prompts."""
# ruff: noqa: RUF009 - `described` makes a dataclass field

import math
from dataclasses import dataclass

from covey.config.groups.describe import described

LEAST_FLOOR = 0.01
"""Below it, a dataset of solved prompts alone would be gone through a hundred times for one sample."""


@dataclass
class GenerationFields:
    """The sampling distribution and the built-in engine."""

    max_completion_length: int | None = described(
        512, "Most tokens of a completion; a longer one is truncated. Unset: until the model's context is full.", ge=1
    )
    temperature: float = described(
        1.0,
        "Divides the logits, when sampling and when computing log-probabilities alike. Higher is more random.",
        gt=0,
        lt=math.inf,
        advice="At 0 all completions of a prompt are equal and every advantage is 0; 1.0 is usual.",
    )
    top_p: float = described(
        1.0,
        "Sample from the smallest set of tokens whose probabilities reach this; 1 keeps all.",
        gt=0,
        le=1,
        advice="1.0 keeps all tokens.",
    )
    top_k: int = described(
        0, "Sample from this many most probable tokens; 0 keeps all.", ge=0, advice="0 keeps all tokens."
    )
    min_p: float | None = described(
        None,
        "Sample from tokens at least this times as probable as the most probable one; unset keeps all.",
        ge=0,
        le=1,
        advice="Unset or 0 keeps all tokens.",
    )
    repetition_penalty: float = described(
        1.0,
        "Above 1, tokens already in the prompt or completion become less probable; 1 changes nothing.",
        gt=0,
        advice="1.0 changes nothing; 1.05 to 1.2 are usual.",
    )
    generation_kwargs: dict | str | None = described(
        None, "Further sampling settings for the engine (a dict or JSON); not for those that have a field of their own."
    )
    chat_template_kwargs: dict | str | None = described(
        None, "Keyword arguments of the chat template (a dict or JSON); a dataset column of that name wins, row by row."
    )
    cache_implementation: str | None = described(
        None, "Kind of key-value cache of transformers' `generate`. The built-in engine manages its own."
    )
    max_concurrent_completions: int = described(
        64,
        "Most completions that the built-in engine decodes at once; the rest wait. Bounds the key-value cache.",
        ge=1,
    )


@dataclass
class SpeculationFields:
    """Completions of earlier epochs as drafts."""

    speculative_reuse: str | None = described(
        None,
        "When a prompt comes again, check its last completions in one pass and decode only from where they no longer "
        "hold. `exact`: the result is what sampling afresh with the same seed gives, and a prompt keeps its seeds from "
        "epoch to epoch; `lenient`: stale tokens may stay. Unset: every completion is decoded token by token.",
    )
    speculative_lenience: float = described(
        1.65,
        "With `speculative_reuse=lenient`, a draft token stays with probability min(1, this * p_now / p_then). "
        "A larger number reuses more and is further off-policy.",
        gt=0,
        lt=math.inf,
        advice="1 to 2 are usual.",
    )
    speculative_max_tokens: int = described(
        50_000_000,
        "Most completion tokens that a process keeps as drafts, 4 bytes each (8 with `lenient`); the oldest go first.",
        ge=1,
    )


@dataclass
class AgentFields:
    """Tools, and generation that overlaps training."""

    max_tool_calling_iterations: int | None = described(
        None,
        "Most rounds of tool calls in one rollout; unset: until the model stops calling.",
        ge=0,
        advice="Leave it unset for as many as the model asks for.",
    )
    tool_timeout: float = described(
        60.0,
        "Seconds that one call of a tool or of an environment may take. A late call fails; its rollout goes on.",
        gt=0,
        lt=math.inf,
        advice="It is in seconds.",
    )
    tool_parser: str | None = described(
        None,
        "Notation of the model's calls, such as `hermes`, `llama3` or `json`. Unset: by what its chat template "
        "mentions.",
    )
    rollout_timeout: float = described(
        3600.0,
        "Seconds that one rollout with tools, an environment or a function of your own may take; a late one fails. For "
        "a `rollout_func(prompts, trainer)`, of all its rollouts together.",
        gt=0,
        lt=math.inf,
        advice="It is in seconds.",
    )
    unstable_chat_template: str = described(
        "raise",
        "Treatment of a chat template that renders earlier turns differently once later ones follow: `raise` "
        "refuses it, `keep` trains on the turns as they were sampled.",
        choices=("raise", "keep"),
    )
    max_staleness: int = described(
        0,
        "Optimizer steps by which the weights that sample may be older than those that are trained, so that later "
        "rollout batches are sampled while one is trained on (async rollouts): 1 is one step ahead. 0 samples and "
        "trains by turns. Needs an engine with weights of its own, such as a server.",
        ge=0,
        advice="0 samples and trains by turns, 1 samples one step ahead.",
    )


@dataclass
class PromptFields:
    """Choice of prompts by the rewards that they have earned."""

    dynamic_sample: bool = described(
        False,
        "Replace groups without a signal (all advantages 0) by groups of further prompts before training "
        "(dynamic sampling, DAPO).",
    )
    max_resample_times: int = described(
        3,
        "With `dynamic_sample`, most rounds of refilling; groups that are missing after them are trained on as they "
        "were first sampled.",
        ge=0,
        advice="0 never refills; 3 is usual.",
    )
    prompt_sampler: str = described(
        "uniform",
        "`uniform`: an epoch samples from every prompt once. `difficulty`: prompts of intermediate difficulty, by "
        "their rewards so far, come more often than those that are always or never solved.",
        choices=("uniform", "difficulty"),
    )
    difficulty_floor: float = described(
        0.1,
        "With prompt_sampler `difficulty`, how often a prompt that is always or never solved comes, relative to one "
        "that is solved half of the time.",
        ge=LEAST_FLOOR,
        le=1,
        advice="At 0 a prompt that failed once would never come again; at 1 all prompts come alike. 0.1 is usual.",
    )
