"""The one narrow door to whatever samples tokens.

An engine turns a token prompt into completions. It knows no tools, rewards, datasets or training; adding one means
writing a class with these three methods and a `from_args`.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from covey.core.media import Media
from covey.core.rollout import Completion
from covey.core.weights import WeightUpdate


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. Filters apply in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: most tokens to sample.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: keep tokens at least this times as probable as the most probable one; None or 0 keeps all.
        repetition_penalty: divide positive and multiply negative logits of tokens already seen (CTRL,
            arXiv 1909.05858); 1 changes nothing.
        extra: further settings passed through to engines that know them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def truncates(self) -> bool:
        """Whether the sampling distribution differs from the softmax at `temperature`."""
        return self.top_k > 0 or self.top_p < 1.0 or bool(self.min_p) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """`n` completions of one prompt.

    Attributes:
        prompt_ids: the tokens to continue.
        n: how many completions; the prompt is computed once for all of them.
        params: how to sample.
        seeds: one 64-bit seed per completion. The same seed, prompt and weights give the same completion, whatever
            else is in flight.
        media: images among `prompt_ids`, for engines of vision-language models. `covey.core.media.unexpanded` gives the
            tokens as inference servers want them.
        drafts: one per seed, or None: tokens this completion may begin with, such as the last completion of the same
            prompt. Engines that verify drafts compute all their positions in one parallel pass and decode only from
            the first token they reject; engines that do not may ignore them. A draft never changes what may come out:
            see `draft_lenience`.
        draft_logprobs: log-probability of each draft token under the policy that wrote it, at the sampling
            temperature, one list per draft (None where the draft is None). Needed by lenient acceptance alone.
        draft_lenience: None accepts exactly: the completion is, token by token, the one this seed would have given
            without the draft. A number l accepts token i with probability min(1, l * p_now / p_then) (SPEC-RL,
            arXiv 2509.23232): more is reused, and the reused part stays off-policy.
        shared: so many first tokens of `prompt_ids` begin other requests too, before and after this one, as a
            conversation's prompt begins all its turns; 0 if that is not known. Engines may keep what they compute for
            them while they are awake. It changes no completion.
    """

    prompt_ids: list[int]
    n: int
    params: SamplingParams
    seeds: list[int]
    media: tuple[Media, ...] = ()
    drafts: list[list[int] | None] | None = None
    draft_logprobs: list[list[float] | None] | None = None
    draft_lenience: float | None = None
    shared: int = 0

    def token_budget(self, max_context: int | None) -> int:
        """Most tokens of each completion, when prompt and completion together may have `max_context`."""
        wanted = self.params.max_tokens
        return wanted if max_context is None else max(1, min(wanted, max_context - len(self.prompt_ids)))


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What an engine's log-probs are, for whoever compares them with the trainer's.

    An engine states its own in an attribute `traits`; one without is taken for a foreign engine that reports what
    `Completion.logprobs` asks for.

    Attributes:
        shares_policy: it samples with the trainer's own weights and precision, so the two agree but for rounding.
        reports_after_cut: top-k, top-p, min-p, penalties and grammars have had their effect on what it reports. Where
            a request uses any, its log-probs are those of another distribution than the trainer scores.
        dtype: what it computes in, if it is known; a narrow one is granted more rounding.
        updates_in_flight: `load_weights` may be called while requests are under way; their later tokens are sampled
            with the new weights, or not, and `Completion.versions` says which. Otherwise an update waits until nothing
            is under way.
        takes_adapters: it can sample from an adapter that is sent without the model it lies on; otherwise weights come
            merged.
        expands_images: it is sent each image as a single token, and looks for these tokens itself.
    """

    shares_policy: bool = False
    reports_after_cut: bool = False
    dtype: torch.dtype | None = None
    updates_in_flight: bool = False
    takes_adapters: bool = False
    expands_images: bool = False


def traits_of(engine: Any) -> EngineTraits:
    """What an engine says about its log-probs, or what is assumed of one that says nothing."""
    return getattr(engine, "traits", EngineTraits())


@runtime_checkable
class RolloutEngine(Protocol):
    """What the collector needs of an engine.

    An attribute `traits: EngineTraits` is optional; see there.
    """

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions; many calls may be in flight at once and the engine batches them."""
        ...

    def load_weights(self, update: WeightUpdate) -> None:
        """Take a version of the policy's weights. An engine that shares the policy's memory ignores it."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Within this context the engine is ready to sample; outside it may release memory."""
        ...
