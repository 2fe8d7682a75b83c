"""Fields about drawing completions: the distribution, the built-in engine, tools."""
# ruff: noqa: RUF009 - `described` makes a dataclass field

from dataclasses import dataclass

from covey.config.groups.describe import described


@dataclass
class GenerationFields:
    """The sampling distribution and the built-in engine."""

    max_completion_length: int | None = described(
        512, "Most tokens of a completion; a longer one is truncated. Unset: until the model's context is full."
    )
    temperature: float = described(
        1.0, "Divides the logits, when sampling and when computing log-probabilities alike. Higher is more random."
    )
    top_p: float = described(1.0, "Sample from the smallest set of tokens whose probabilities reach this; 1 keeps all.")
    top_k: int = described(0, "Sample from the this many most probable tokens; 0 keeps all.")
    min_p: float | None = described(
        None, "Sample from tokens at least this times as probable as the most probable one; unset keeps all."
    )
    repetition_penalty: float = described(
        1.0, "Above 1, tokens already in the prompt or completion become less probable; 1 changes nothing."
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
        64, "Most completions that the built-in engine decodes at once; the rest wait. Bounds the key-value cache."
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
    )
    speculative_max_tokens: int = described(
        50_000_000,
        "Most completion tokens that a process keeps as drafts, 4 bytes each (8 with `lenient`); the oldest go first.",
    )


@dataclass
class AgentFields:
    """Tools, and generation that overlaps training."""

    max_tool_calling_iterations: int | None = described(
        None, "Most rounds of tool calls in one rollout; unset: until the model stops calling."
    )
    tool_timeout: float = described(
        60.0, "Seconds that one call of a tool or of an environment may take. A late call fails; its rollout goes on."
    )
    tool_parser: str | None = described(
        None,
        "How the model writes its calls, such as `hermes`, `llama3` or `json`. Unset: by what its chat template "
        "mentions.",
    )
    rollout_timeout: float = described(
        3600.0,
        "Seconds that one rollout with tools, an environment or a function of your own may take; a late one fails. For "
        "a `rollout_func(prompts, trainer)`, of all its rollouts together.",
    )
    unstable_chat_template: str = described(
        "raise",
        "What to do with a chat template that renders earlier turns differently once later ones follow: `raise` "
        "refuses it, `keep` trains on the turns as they were sampled.",
    )
    max_staleness: int = described(
        0,
        "Optimizer steps by which the weights that sample may be older than those that are trained, so that coming "
        "generations are sampled while one is trained on: 1 is one step ahead. 0 samples and trains by turns. Needs an "
        "engine with weights of its own, such as a server.",
    )
