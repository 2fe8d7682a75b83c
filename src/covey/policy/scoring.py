"""Scores of tokens under the policy, its earlier versions and its reference.

The head is applied only to hidden states that predict scored tokens; prompts go through the decoder, not the head.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from covey.core.batch import TrainBatch, segment_starts
from covey.core.findings import CheckError
from covey.core.model import decoder_of, image_inputs, inference_mode_of, name_of
from covey.core.records import Rollout
from covey.core.routes import unknown_like
from covey.core.routing import RouteReading, check_routing
from covey.core.strands import unfolded
from covey.policy.attention import PACKED_ATTENTION
from covey.policy.image_dedup import deduplicated_images
from covey.policy.layouts import LAYOUTS, ModelInputs, choose_layout, synthetic_rollouts
from covey.policy.lm_head.scores import Head, TokenScores, head_of, score_hidden, score_in_head_call
from covey.policy.lm_head.support import SampledSupport
from covey.policy.lm_head.teacher import TeacherHead, TeacherRows
from covey.policy.moe import RouterLoads, loads_of, router_logits


class Teachers(NamedTuple):
    """Heads of the teachers of a batch's rollouts, and β of the divergence over the whole vocabulary."""

    heads: tuple[TeacherHead, ...]
    beta: float


class Asked(NamedTuple):
    """Quantities to compute in addition to log-probs, or tokens to score; see `TokenScorer.__call__`."""

    entropy: bool = False
    targets: Tensor | None = None  # [N]
    named: Tensor | None = None  # [N, K]
    top: int = 0
    hidden: bool = False
    teachers: Teachers | None = None


@dataclass(eq=False)
class TokenScorer:
    """Log-probabilities and entropies of a batch's tokens, log-probs of further tokens, and the likeliest tokens.

    All of these are read from one pass over the head's logits. A token is scored by the hidden state of the token
    before it: a completion's first token by that of the last prompt token.

    Examples:
        Log-probs with gradients, as for a policy loss; K tokens that a teacher named at each position; and the 20
        likeliest tokens of each position while scoring:

        >>> scorer(policy, batch).logprobs  # doctest: +SKIP
        >>> scorer(policy, batch, named=batch.named_ids).named  # [N, K]  # doctest: +SKIP
        >>> with torch.no_grad():  # doctest: +SKIP
        ...     scores = scorer(teacher, batch, top=20)  # scores.top_ids, scores.top_logprobs: [N, 20]
    """

    unwrap: Callable[[Any], Any]  # from a (distributed) wrapper to the transformers model inside
    _: KW_ONLY
    temperature: float  # divides the logits, as in sampling
    repetition_penalty: float = 1.0  # that samples were drawn with; sampling masks are in the batch
    # "auto" for the fastest that is correct of shared_prefix, packed and padded. Any other name sets the layout, and is
    # refused if it gives wrong log-probs. After the first model (the policy) was tried, the layout that was chosen
    layout: str = "auto"
    pad_token_id: int = 0  # fills padded rows
    chunk_size: int = 1024  # most tokens whose logits are in memory at once
    float32_head: bool = False  # multiply by the head in float32
    # score inside the call of the head, for models whose wrappers need all of their hooks (FSDP, DeepSpeed)
    inside_head_call: bool = False
    # the model gets images: rows are padded, and the model computes positions itself, which may have two dimensions
    vision: bool = False
    # with an image; added to batches without images where encoding images is collective (FSDP2, ZeRO-3)
    blank: Rollout | None = None

    def __post_init__(self) -> None:
        self._wanted = self.layout
        self._layouts: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def __call__(
        self,
        model: Any,
        batch: TrainBatch,
        *,
        entropy: bool = False,
        targets: Tensor | None = None,
        named: Tensor | None = None,
        top: int = 0,
        hidden: bool = False,
        teachers: Teachers | None = None,
    ) -> TokenScores:
        """Score a batch where `batch.scored` is True; with gradients if they are enabled.

        Args:
            model: the model, or a (distributed) wrapper of it.
            batch: all of its tokens are read as context, even if other tokens are scored (`targets`).
            entropy: also compute the entropy of each position, in nats.
            targets: [N] int64, tokens to score in place of the batch's own.
            named: [N, K] int64, further tokens to score, with gradients; -1 for none. They need not be distinct.
            top: number T of likeliest tokens to return at each position, without gradients; at most the vocabulary.
            hidden: also return the hidden state that the head reads at each position, [N, H] in the model's dtype.
            teachers: also compute the divergence [N] from the teachers whose `teacher_hidden` the batch has.

        Returns:
            Scores [N], [N, K] and [N, T] in float32 (float64 for such a model) at the temperature, over the sampling
            masks of the batch and with its repetition penalty. Where `batch.scored` is False they are 0, and -inf for
            `named` and `top_logprobs`.
        """
        asked = Asked(entropy, targets, named, top, hidden, teachers)
        return self._score(model, batch, self.layout_of(model, batch), asked)[0]

    def routes(
        self, model: Any, batch: TrainBatch, *, entropy: bool = False
    ) -> tuple[TokenScores, Tensor, list[Tensor]]:
        """Score a mixture of experts and read the experts of its tokens; routes of the batch are forced.

        Returns:
            Scores, the routes of completion tokens [N, L, k], and the routes of each prompt [its length, L, k].
        """
        layout, rows, tokens = self.layout_of(model, batch), batch, None
        if batch.jumps is not None:
            rows, _, tokens = unfolded(batch)
        scores, _ = self._score(model, batch, layout, Asked(entropy), reads_routes=True)
        assert scores.routes is not None and scores.routes.taken is not None, "asked for"
        taken, sources = scores.routes.taken, LAYOUTS[layout](rows, self.pad_token_id).sources
        found = unknown_like(taken, len(rows.prompt_ids) + rows.num_tokens)
        found[sources[sources >= 0]] = taken[sources >= 0]
        of_prompts, of_tokens = found.split([len(rows.prompt_ids), rows.num_tokens])
        prompts = list(of_prompts.split(rows.prompt_lengths.tolist()))
        if tokens is None:
            return scores, of_tokens, prompts
        whole = of_strands(rows, tokens, of_tokens, prompts, batch.num_tokens)
        # the first strand of a rollout begins with its whole prompt
        by_prompt = dict(zip((tuple(one.tolist()) for one in rows.prompts()), prompts, strict=True))
        return scores, whole, [by_prompt[tuple(one.tolist())] for one in batch.prompts()]

    def with_loads(
        self,
        model: Any,
        batch: TrainBatch,
        top_k: int,
        *,
        entropy: bool = False,
        targets: Tensor | None = None,
        named: Tensor | None = None,
        top: int = 0,
        teachers: Teachers | None = None,
    ) -> tuple[TokenScores, RouterLoads]:
        """Score a batch and sum the router loads of its trained rollouts; CheckError as of `moe.router_logits`."""
        asked = Asked(entropy, targets, named, top, teachers=teachers)
        scores, loads = self._score(model, batch, self.layout_of(model, batch), asked, top_k)
        assert loads is not None, "top_k is given"
        return scores, loads

    @torch.no_grad()
    def loads(self, model: Any, batch: TrainBatch, top_k: int) -> RouterLoads:
        """Router loads as in `with_loads`, without applying the head."""
        counted = batch.sampled_lengths > 0
        blank = replace(batch, sampled=torch.zeros_like(batch.sampled), term_tokens={}, term_scales={})
        loads = self._score(model, blank, self.layout_of(model, batch), Asked(), top_k, counted)[1]
        assert loads is not None, "top_k is given"
        return loads

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        previous, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = previous

    def layout_of(self, model: Any, batch: TrainBatch) -> str:
        """Layout of a model, chosen by trials on the first call; CheckError for an unsupported head or layout."""
        inner = self.unwrap(model)
        if inner not in self._layouts:
            self._layouts[inner] = self._try_layouts(inner, batch.token_ids.device)
            if len(self._layouts) == 1:
                self.layout = self._layouts[inner]
        return self._layouts[inner]

    def adopt(self, model: Any, layout: str) -> None:
        """Use `layout` for a model instead of the chosen one, as when processes agree on a common one."""
        inner = self.unwrap(model)
        self._layouts[inner] = layout
        if next(iter(self._layouts)) is inner:
            self.layout = layout

    def _score(
        self,
        model: Any,
        batch: TrainBatch,
        layout: str,
        asked: Asked,
        top_k: int | None = None,
        counted: Tensor | None = None,
        reads_routes: bool = False,
    ) -> tuple[TokenScores, RouterLoads | None]:
        inner = self.unwrap(model)
        counted = batch.sampled_lengths > 0 if counted is None else counted
        rollouts, learned = batch, batch.scored.nonzero()[:, 0]
        if batch.jumps is not None:
            batch, owners, _ = unfolded(batch)
            counted = counted[owners]
        blank = self.blank is not None and not any(batch.media or ())
        if blank and self.blank is not None:
            batch, counted = with_blank(batch, self.blank), torch.cat([counted, counted.new_zeros(1)])
        inputs = LAYOUTS[layout](batch, self.pad_token_id)
        kwargs = dict(inputs.kwargs)
        shown: AbstractContextManager[dict[str, Tensor]] = nullcontext({})
        if self.vision:  # only the model can compute the positions of images
            del kwargs["position_ids"]
            shown = image_inputs(inner, kwargs["input_ids"], batch.media or [()] * len(batch), self.pad_token_id)
        if layout != "padded" and inner.config._attn_implementation != PACKED_ATTENTION:
            # It stays set, because backward may recompute layers. Calls without a token tree are plain SDPA with it.
            inner.set_attn_implementation(PACKED_ATTENTION)
        scored = learned if rollouts.jumps is None else batch.sampled.nonzero()[:, 0]
        head = head_of(inner, float32=self.float32_head)
        predictors = inputs.predictors[scored]
        whole = batch.kept_counts is None and self.repetition_penalty == 1.0
        score_states = partial(
            score_hidden,
            targets=batch.token_ids[scored] if asked.targets is None else asked.targets[learned],
            named=None if asked.named is None else asked.named[learned].long(),
            top=asked.top,
            temperature=self.temperature,
            entropy=asked.entropy,
            chunk_size=self.chunk_size,
            support=None if whole else SampledSupport.of(batch, scored, self.repetition_penalty),
            teacher=self._teacher_rows(rollouts, learned, asked.teachers),
        )

        def score(hidden: Tensor, head: Head) -> TokenScores:
            scores = score_states(hidden, head=head)
            return scores._replace(hidden=hidden.detach()) if asked.hidden else scores

        of_decoder = {} if top_k is None else {"output_router_logits": True}
        # A compiled model would be compiled again for every forward pass.
        dedup = deduplicated_images(inner) if self.vision and not hasattr(model, "_orig_mod") else nullcontext()
        routed = self._routed(inner, batch, inputs, reads_routes)
        with decoder_outputs(inner, **of_decoder) as outputs, shown as images, dedup, routed as found:
            kwargs |= images
            if self.inside_head_call:

                def score_all(hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> TokenScores:
                    scores = score(hidden.flatten(0, 1)[predictors], replace(head, forward=forward))
                    # The blank row's image gets a gradient of 0, so that backward runs its encoder's collectives, too.
                    return scores._replace(logprobs=scores.logprobs + 0.0 * hidden[-1].sum()) if blank else scores

                scores = score_in_head_call(model, head.module, score_all, **kwargs)
            else:
                # The whole model is called, so that wrappers see their forward pass; its head gets one position.
                model(**kwargs, use_cache=False, logits_to_keep=1)
                scores = score(outputs[0][0].flatten(0, 1)[predictors], head)
        scores = scores._replace(routes=found)
        loads = None
        if top_k is not None:
            loads = loads_of(router_logits(inner, outputs[0]), inputs.sum_over_readers(counted.float()), top_k)
        return scores if len(learned) == rollouts.num_tokens else scores.scattered(learned, rollouts.num_tokens), loads

    def _teacher_rows(self, batch: TrainBatch, learned: Tensor, teachers: Teachers | None) -> TeacherRows | None:
        """The teachers of the scored tokens, in the tokens' order; None without teachers."""
        if teachers is None or batch.teacher_hidden is None:
            return None
        numbers = None if batch.teacher_numbers is None else batch.teacher_numbers[learned]
        return TeacherRows(teachers.heads, batch.teacher_hidden[learned], numbers, teachers.beta, self.temperature)

    def _routed(
        self, inner: Any, batch: TrainBatch, inputs: ModelInputs, reads: bool
    ) -> AbstractContextManager[RouteReading | None]:
        """Context of a forward pass that replays the batch's routes or reads the model's; else an empty context."""
        if batch.routes is None and not reads:
            return nullcontext()
        routing = check_routing(inner, "routes")
        given = None
        if batch.routes is not None and batch.prompt_routes is not None:
            stored = torch.cat([batch.prompt_routes, batch.routes])
            stored = torch.cat([stored, unknown_like(stored, 1)])  # which -1 refers to
            given = stored[inputs.sources]
        return routing.passing(given, writes=reads)

    @torch.no_grad()
    def _try_layouts(self, inner: Any, device: torch.device) -> str:
        """Check the head and choose a layout on a few synthetic rollouts."""
        few = LAYOUTS["padded"](synthetic_rollouts(inner.config, device), self.pad_token_id).kwargs

        def score(layout: str, batch: TrainBatch) -> Tensor:
            return self._score(inner, batch, layout, Asked())[0].logprobs

        with inference_mode_of(inner):
            _check_head(inner, few, self.inside_head_call)
            return choose_layout(self._wanted, inner, score, device)


def of_strands(rows: TrainBatch, tokens: Tensor, routes: Tensor, prompts: list[Tensor], count: int) -> Tensor:
    """Routes [count, L, k] of a batch's tokens, each from the first of its strands' rows that contains the token.

    `tokens` [R] are the indexes in the batch of the rows' tokens, as `unfolded` returns them.
    """
    whole, places = unknown_like(routes, count), tokens.cpu().numpy()
    known, first = np.unique(places, return_index=True)
    whole[torch.from_numpy(known)] = routes[torch.from_numpy(first)]
    begins, lengths = segment_starts(rows.lengths).tolist(), rows.lengths.tolist()
    for row, group in enumerate(rows.groups.tolist()):
        before = int(places[begins[row]]) - 1 if lengths[row] else -1
        if before >= 0 and before not in known and len(prompts[group]) == 1:  # a token that stands for the prompt
            whole[before] = prompts[group][0]
    return whole


def with_blank(batch: TrainBatch, blank: Rollout) -> TrainBatch:
    """The batch with one more rollout at its end: a prompt with an image and an empty completion."""
    longer = partial(nn.functional.pad, pad=(0, 1))
    return replace(
        batch,
        lengths=longer(batch.lengths, value=0),
        prompt_ids=torch.cat([batch.prompt_ids, batch.prompt_ids.new_tensor(blank.prompt_ids)]),
        prompt_lengths=longer(batch.prompt_lengths, value=len(blank.prompt_ids)),
        groups=longer(batch.groups, value=len(batch.prompt_lengths)),
        media=[*([()] * len(batch)), blank.media],
    )


def first_and_last(batch: TrainBatch) -> Tensor:
    """Indices of up to four rollouts with trained tokens: two from either end, so that prompts are equal and differ."""
    filled = batch.sampled_lengths.nonzero()[:, 0]
    return torch.cat([filled[:2], filled[2:][-2:]])


def _check_head(model: Any, inputs: dict[str, Any], inside_head_call: bool) -> None:
    """Raise a CheckError unless `Head` gives the model's own logits."""
    head, ours = head_of(model), []
    if inside_head_call:

        def score_last(hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> TokenScores:
            ours.append(replace(head, forward=forward)(hidden[:, -1]).float())
            return TokenScores(ours[0])

        score_in_head_call(model, head.module, score_last, **inputs)
        theirs = model(**inputs, use_cache=False).logits[:, -1].float()
    else:
        with decoder_outputs(model) as outputs:
            theirs = model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        ours.append(head(outputs[0][0][:, -1]).float())
    difference = (ours[0] - theirs).abs().max().item()
    if difference > 1e-2 * max(1.0, theirs.abs().max().item()):
        raise CheckError.of(
            "model-head",
            f"the logits of {name_of(model)} differ by {difference:.2g} from those of its head as Covey computes them."
            " Supported: a linear head, logit scaling, soft-capping.",
            "Please report the model.",
        )


@contextmanager
def decoder_outputs(model: Any, **asked: Any) -> Iterator[list[Any]]:
    """List that receives the decoder's output of each forward pass within; `output[0]` are the last hidden states.

    `asked` are further keyword arguments for the decoder, such as `output_router_logits`. Given to the whole model,
    that one would also make it compute a balancing loss of its own, over padding as well.
    """
    decoder, outputs = decoder_of(model), list[Any]()
    ask: AbstractContextManager[Any] = nullcontext()
    if asked:
        ask = decoder.register_forward_pre_hook(lambda _, args, given: (args, given | asked), with_kwargs=True)
    with ask, decoder.register_forward_hook(lambda _, args, output: outputs.append(output)):
        yield outputs
