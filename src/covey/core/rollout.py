"""What sampling produces: token lists, no tensors.

A `Completion` is one answer of an engine; a `Rollout` is a finished episode, ready to be scored and trained on.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from covey.core.media import Media, images_of

Message = dict[str, Any]
"""One chat message: `{"role": ..., "content": ...}` and whatever else a chat template reads."""


class FinishReason(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"
    """The policy emitted an end-of-sequence token."""
    LENGTH = "length"
    """The completion reached `max_completion_length`, or the context ended: truncated."""
    TOOL_BUDGET = "tool_budget"
    """The tool-calling iterations were used up."""
    ERROR = "error"
    """Something outside the policy failed; the rollout carries what there was until then."""


@dataclass(slots=True)
class Completion:
    """One sampled continuation of a prompt, as an engine returns it.

    Attributes:
        token_ids: the sampled tokens, the end-of-sequence token included where one was sampled.
        logprobs: natural log-probability of each token under the sampling policy at its temperature, before
            top-k, top-p and min-p cut the tail: the quantity the trainer's own scorer computes. None if the engine
            does not report them.
        finish: STOP or LENGTH.
        entropies: entropy in nats of the distribution each token was drawn from, at the temperature and before any
            cut; None if the engine does not report them.
        reused: how many of the first tokens were taken from a draft (`SampleRequest.drafts`) instead of decoded one
            by one; their log-probs and entropies are the current policy's all the same.
        versions: policy version, in optimizer steps, that each token was sampled with; None if the engine does not
            say. Tokens of one completion differ in it where new weights arrived while it was being sampled.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish: FinishReason
    entropies: list[float] | None = None
    reused: int = 0
    versions: list[int] | None = None


@dataclass(slots=True)
class Rollout:
    """One finished episode.

    Attributes:
        prompt_ids: tokens the episode started from; never trained on.
        completion_ids: every token after the prompt: sampled ones and, with tools, those of tool results.
        sampled: the only mask. True where the policy chose the token, False where something else wrote it.
        logprobs: as the engine saw them, one per completion token (0.0 where not sampled), or None.
        entropies: likewise.
        completion: what reward functions receive: a string (standard prompts) or a list of messages.
        finish: why it ended.
        group: index, within the batch, of the prompt it shares with its siblings.
        reused: how many of the sampled tokens were taken from a draft.
        versions: policy version, in optimizer steps, that each completion token was sampled with; None if the engine
            does not say.
        media: what a vision-language model is shown besides text: in the prompt, then in the results of tools.
        extras: further fields for reward functions (from a `rollout_func` or an environment).
        turn_ends: where each of the policy's turns ends: the index of its last token among `completion_ids`. Empty
            where nobody says, which means one turn that ends with the completion.
        calls: how many calls of tools had which fate: "ok", or one of `covey.rollout.tools.toolbox.Failure`.
        prompt: what the episode started from, text or messages, where that need not be the row's prompt; else None.
        error: what failed outside of the policy, in words, where `finish` is ERROR.
        seconds: from the beginning of the rollout to its end, where an agent played it.
        tool_seconds: those of them in which it waited for its tools.

    Raises:
        ValueError: lists that belong to tokens have other lengths than `completion_ids`.

    Example:
        A rollout that answered "4<eos>" to "2+2=":
        `Rollout([17, 10, 17, 28], [19, 2], [True, True], [-0.1, -0.2], "4", FinishReason.STOP)`
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    sampled: list[bool]
    logprobs: list[float] | None
    completion: str | list[Message]
    finish: FinishReason
    group: int = 0
    entropies: list[float] | None = None
    media: tuple[Media, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)
    reused: int = 0
    versions: list[int] | None = None
    turn_ends: list[int] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    tool_seconds: float = 0.0
    prompt: str | list[Message] | None = None

    def __post_init__(self) -> None:
        tokens = len(self.completion_ids)
        for name in ("sampled", "logprobs", "entropies", "versions"):
            values = getattr(self, name)
            if values is not None and len(values) != tokens:
                raise ValueError(
                    f"a Rollout of {tokens} completion_ids was given {len(values)} {name}: give one for each token of"
                    " the completion, those of tool results included."
                )
        if not all(0 <= end < tokens for end in self.turn_ends):
            raise ValueError(
                f"a Rollout of {tokens} completion_ids was given turn_ends={self.turn_ends}: give the index of the last"
                " token of each turn among completion_ids, from 0 on."
            )

    @property
    def images(self) -> list[Any]:
        """The images of `media`, in the order of the tokens that stand for them."""
        return images_of(self.media)

    def asked(self, row: dict[str, Any]) -> Any:
        """The prompt as reward functions and logs get it: the episode's own, or the row's."""
        return row.get("prompt") if self.prompt is None else self.prompt

    @property
    def truncated(self) -> bool:
        """Whether the policy was cut off rather than having stopped by itself."""
        return self.finish is not FinishReason.STOP

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy chose."""
        return sum(self.sampled)

    @property
    def num_turns(self) -> int:
        """How many turns the policy took."""
        return max(len(self.turn_ends), int(any(self.sampled)))
