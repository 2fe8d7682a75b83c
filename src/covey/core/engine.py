"""The protocol of sampling engines.

An engine turns a token prompt into completions. It knows no tools, rewards, datasets or training. To add one, write a
class with the three methods of `RolloutEngine`.
"""

import difflib
import math
import numbers
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from covey.core.findings import CheckError, Finding
from covey.core.media import Media
from covey.core.records import Completion


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor before it is sent: Hugging Face name, full shape, and the number format it is sent in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightUpdate:
    """One version of the policy's weights."""

    version: int  # number of optimizer steps behind these weights; increases with every update
    # every tensor, in the order in which `tensors` yields them. Known without gathering anything.
    specs: tuple[TensorSpec, ...]
    # starts an iteration over (name, tensor). A tensor is whole and belongs to the caller until the next one is
    # requested. Under sharding the iteration is collective: every process goes through it, in step, whether it sends or
    # not. A retry calls it again.
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    # None where the tensors are the whole model's. Otherwise they are a PEFT adapter's, under the names of its
    # checkpoint, and this is its configuration (`adapter_config.json`).
    adapter: dict[str, Any] | None = None
    # the adapter's base model, for an engine that does not have it; None where it cannot be sent
    base: "WeightUpdate | None" = None
    # the adapter's name, for an engine that holds several (`SampleRequest.adapter`); None: it holds one
    adapter_name: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def checked(self) -> Generator[tuple[TensorSpec, Tensor], None, None]:
        """Iterate over the tensors; RuntimeError where one has another name, shape or dtype than its spec."""
        for index, (spec, sent) in enumerate(zip_longest(self.specs, self.tensors())):
            if sent is None:
                raise RuntimeError(
                    f"weights of version {self.version}: {len(self.specs) - index} tensors are missing, the first is"
                    f" {spec.name!r}."
                )
            name, tensor = sent
            if spec is None:
                raise RuntimeError(f"weights of version {self.version}: {name!r} was sent but not announced.")
            if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
                raise RuntimeError(
                    f"weights of version {self.version}: {spec.name!r} {list(spec.shape)} {spec.dtype} was announced,"
                    f" but {name!r} {list(tensor.shape)} {tensor.dtype} was sent."
                )
            yield spec, tensor


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """Result of one weight update of servers that accept differences, summed over servers; `a + b` adds two results."""

    servers: int  # number of servers that were sent the update
    nbytes: int  # bytes of weights, sent to all servers together
    whole: int  # number of servers that were sent every tensor, because they did not hold the previous update
    # share of the model's numbers that were sent, in an update sent as differences; None where no server was sent any
    changed: float | None = None

    def __add__(self, other: "WeightTransfer") -> "WeightTransfer":
        changed = self.changed if other.changed is None else other.changed
        return WeightTransfer(
            self.servers + other.servers, self.nbytes + other.nbytes, self.whole + other.whole, changed
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings. Filters apply in this order: repetition penalty, `extra`, temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: most tokens to sample.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: keep tokens at least this times as probable as the most probable one; None or 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already seen (CTRL, arXiv
            1909.05858); 1 changes nothing.
        extra: further settings, passed through to engines that know them; `docs/engines.md` has the built-in one's.
        keep_mask: return the tokens that each token was drawn from (`Completion.sampling_mask`), and log-probs and
            entropies of the distribution that was sampled from, after all filters. The keep-sampling-mask of
            DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).
        keep_routes: return the experts that each token was sent to (`Completion.routes`), of a mixture of experts.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)
    keep_mask: bool = False
    keep_routes: bool = False

    @property
    def truncates(self) -> bool:
        """True if the sampling distribution is not the softmax at `temperature`."""
        return self.top_k > 0 or self.top_p < 1.0 or bool(self.min_p) or self.repetition_penalty != 1.0

    def changed(self, changes: dict[str, Any], function: str) -> "SamplingParams":
        """These settings with a user's changes; ValueError, naming the function, for one that cannot be sampled with.

        Example:
            >>> SamplingParams(8).changed({"temperature": 0.5}, "generate").temperature
            0.5
        """
        known = [one.name for one in fields(self)]
        for name, value in changes.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                proposal = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"`{function}` has no setting {name!r}; it takes {', '.join(known)}.{proposal}")
            if name in ALLOWED and (wrong := [*check_setting(name, value, f"{name}={value!r} of `{function}`")]):
                raise CheckError(*wrong)
        return replace(self, **changes)


ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_tokens": ("whole, 1 or more", lambda value: value >= 1 and value % 1 == 0),
    "temperature": ("0 (greedy), or 1e-05 or more", lambda value: value == 0 or 1e-5 <= value < math.inf),
    "top_k": ("whole, 0 (all) or more", lambda value: value >= 0 and value % 1 == 0),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("above 0", lambda value: 0 < value < math.inf),
}
"""Values of sampling settings that a user may give, as text and as a predicate; of `min_p` also None."""


def check_setting(name: str, value: Any, given: str) -> Iterator[Finding]:
    """An error for a value of a sampling setting that is not `ALLOWED`; `given` names it in the message."""
    allowed, allows = ALLOWED[name]
    usable = isinstance(value, numbers.Real) and not isinstance(value, bool) and allows(value)
    if not usable and not (value is None and name == "min_p"):
        yield Finding.error("setting-range", f"{given} must be a number, {allowed}.")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """`n` completions of one prompt.

    Attributes:
        prompt_ids: tokens to continue.
        n: number of completions; the prompt is computed once for all of them.
        params: sampling settings.
        seeds: one 64-bit seed per completion. The same seed, prompt and weights give the same completion, whatever
            else is sampled.
        media: images among `prompt_ids`, for engines of vision-language models; `covey.core.media.unexpanded` gives
            the tokens in the form that inference servers accept.
        drafts: one per seed, or None: tokens that the completion may begin with, such as the last completion of the
            same prompt. Engines that verify drafts compute all their positions in one parallel forward pass and decode
            only from the first token they reject; others may ignore them. A draft does not change which completions
            are possible: see `draft_lenience`.
        draft_logprobs: log-probability of each draft token under the policy that wrote it, at the sampling
            temperature, one list per draft (None where the draft is None); lenient acceptance alone needs them.
        draft_lenience: None accepts exactly: the completion is, token by token, the one this seed would have given
            without the draft. A number l accepts token i with probability min(1, l * p_now / p_then) (SPEC-RL, arXiv
            2509.23232): more is reused, and the reused part stays off-policy.
        shared: number of first tokens of `prompt_ids` that other requests begin with too, as all turns of a
            conversation begin with its prompt; 0 if unknown. Engines may cache their computation while they are awake.
            It changes no completion.
        adapter: the adapter to sample with, by its name, of an engine that holds several over one model; None: the
            model, or the one adapter, that the engine holds.
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
    adapter: str | None = None

    def token_budget(self, max_context: int | None) -> int:
        """Most tokens of each completion, when prompt and completion together may have `max_context`."""
        wanted = self.params.max_tokens
        return wanted if max_context is None else max(1, min(wanted, max_context - len(self.prompt_ids)))


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Capabilities of an engine and properties of its log-probs.

    An engine declares them in an attribute `traits`; one without it is treated as an external engine that reports
    `Completion.logprobs` as documented there.

    Attributes:
        shares_policy: it samples with the trainer's own weights, so none are sent. Without `rounded_to` it computes in
            the trainer's precision, too, and the log-probs of the two agree up to rounding.
        rounded_to: number format that it rounds weights and inputs to (`engine_dtype`), or None. With one it samples
            from another policy than the trained one: importance weights correct that, and log-probs get a larger
            tolerance.
        reports_after_cut: its log-probs are taken after top-k, top-p, min-p, penalties and grammars. Where a request
            uses any of these, they belong to another distribution than the one that the trainer scores.
        dtype: number format it computes in, if known; a narrow one gets a larger tolerance.
        updates_in_flight: `load_weights` may be called during requests; `Completion.versions` gives the weights that
            each later token was sampled with. Otherwise an update waits until no request is in flight.
        takes_adapters: it can sample from an adapter that is sent without its base model; otherwise weights are sent
            merged.
        expands_images: each image is sent as a single token, which the engine expands.
        returns_masks: it obeys `SamplingParams.keep_mask`.
        returns_routes: it obeys `SamplingParams.keep_routes`, for the models that `covey.core.routing` knows.
        batch_invariant: on a CPU the same request and weights give the same bits of log-probs too, whatever else is
            sampled. Otherwise they agree up to rounding, and so do repeated and resumed runs.
    """

    shares_policy: bool = False
    reports_after_cut: bool = False
    dtype: torch.dtype | None = None
    updates_in_flight: bool = False
    takes_adapters: bool = False
    expands_images: bool = False
    returns_masks: bool = False
    returns_routes: bool = False
    batch_invariant: bool = False
    rounded_to: str | None = None

    @property
    def samples_policy(self) -> bool:
        """True if it samples from the trained policy itself, up to rounding."""
        return self.shares_policy and self.rounded_to is None


def traits_of(engine: Any) -> EngineTraits:
    return getattr(engine, "traits", EngineTraits())


@runtime_checkable
class RolloutEngine(Protocol):
    """Interface of an engine. An attribute `traits: EngineTraits` is optional."""

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions; many calls may be in flight at once and the engine batches them."""
        ...

    def load_weights(self, update: WeightUpdate) -> WeightTransfer | None:
        """Load a version of the policy's weights. An engine that shares the policy's memory ignores it.

        Returns what was sent where that may be less than the update, else None.
        """
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Context in which the engine is ready to sample; outside of it, it may release memory."""
        ...
