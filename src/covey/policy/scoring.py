"""Scores tokens under a model: the one place where the policy, its old self and its reference are run forward.

`TokenScorer` picks a layout, runs the decoder, takes the hidden states that predict sampled tokens and applies the head
to them alone: prompts and the results of tools go through the decoder and no further. Not here: what the scores are
for.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.media import media_inputs, placeholder_ids, reading, stray_placeholders
from covey.core.model import decoder_of, inference_mode_of, name_of
from covey.core.records import Rollout
from covey.policy.attention import PACKED_ATTENTION
from covey.policy.image_dedup import encoded_once
from covey.policy.layouts import LAYOUTS
from covey.policy.layouts.selection import choose_layout, made_up_rollouts
from covey.policy.lm_head.scores import TokenScores, head_of, score_hidden
from covey.policy.moe import RouterLoads, captured_router_logits, loads_of, refuse_without_gradient
from covey.policy.sharded_head import scores_inside


class TokenScorer:
    """Log-probabilities and entropies of the tokens that are learned from.

    Args:
        unwrap: from a (distributed) wrapper to the transformers model inside.
        temperature: divides the logits, as in sampling.
        layout: "auto" takes the fastest that proves right: shared_prefix, packed, padded. A name insists, and is
            refused where it is wrong.
        pad_token_id: fills padded rows.
        chunk_size: tokens whose logits live at once.
        float32_head: multiply by the head in float32.
        inside: score inside the call of the head, for models whose wrappers need all of their hooks (FSDP, DeepSpeed).
        vision: the model is shown images. Rows are padded then, and it finds the positions of their tokens itself, as
            images may have positions in two dimensions and attend to themselves in both directions.
    """

    def __init__(
        self,
        unwrap: Callable[[Any], Any],
        *,
        temperature: float,
        layout: str = "auto",
        pad_token_id: int = 0,
        chunk_size: int = 1024,
        float32_head: bool = False,
        inside: bool = False,
        vision: bool = False,
    ):
        self.unwrap = unwrap
        self.temperature = temperature
        self.layout = layout
        """What was asked for; once a model is settled, the first one's (the policy's) own layout."""
        self.pad_token_id = pad_token_id
        self.chunk_size = chunk_size
        self.float32_head = float32_head
        self.inside = inside
        self.vision = vision
        self.blank: Rollout | None = None
        """Shown to the model in passes over text alone, where encoding images takes all processes (FSDP2, ZeRO-3)."""
        self._wanted = layout
        self._layouts: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def __call__(self, model: Any, batch: TrainBatch, *, entropy: bool = False) -> TokenScores:
        """Score the tokens of a batch that are learned from.

        Args:
            model: the policy or the reference, wrapped or not.
            batch: on the model's device.
            entropy: also return entropies.

        Returns:
            logprobs [N] float32 and entropies [N] float32 or None; gradients flow where enabled. Both are 0 where
            `batch.sampled` is False.
        """
        return self._score(model, batch, self.settle(model, batch), entropy)[0]

    def with_loads(
        self, model: Any, batch: TrainBatch, top_k: int, *, entropy: bool = False
    ) -> tuple[TokenScores, RouterLoads]:
        """Score a batch, and add up what the routers of a mixture of experts do with it.

        All tokens of rollouts count that have something to learn from: prompts, completions and results of tools.

        Args:
            model, batch, entropy: as when called.
            top_k: experts of a token.

        Raises:
            ValueError: the routers' logits, or the way back from them, cannot be had.
        """
        scores, loads = self._score(model, batch, self.settle(model, batch), entropy, top_k)
        assert loads is not None, "asked for"
        return scores, loads

    @torch.no_grad()
    def loads(self, model: Any, batch: TrainBatch, top_k: int) -> RouterLoads:
        """What `with_loads` adds up, without the head's work."""
        counted = batch.sampled_lengths > 0
        blank = replace(batch, sampled=torch.zeros_like(batch.sampled))
        loads = self._score(model, blank, self.settle(model, batch), False, top_k, counted)[1]
        assert loads is not None, "asked for"
        return loads

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Score at another temperature for the duration."""
        usual, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = usual

    def settle(self, model: Any, batch: TrainBatch) -> str:
        """The model's layout, chosen the first time; whoever plans by tokens asks for it beforehand.

        Raises:
            ValueError: the model has a head that Covey does not know, or the user insists on a layout that is wrong.
        """
        inner = self.unwrap(model)
        if inner not in self._layouts:
            self._layouts[inner] = self._prove(inner, batch.token_ids.device)
            if len(self._layouts) == 1:
                self.layout = self._layouts[inner]
        return self._layouts[inner]

    def adopt(self, model: Any, layout: str) -> None:
        """Score a model in another layout than it was settled in, as where processes have to agree on one."""
        inner = self.unwrap(model)
        self._layouts[inner] = layout
        if next(iter(self._layouts)) is inner:
            self.layout = layout

    def _score(
        self,
        model: Any,
        batch: TrainBatch,
        layout: str,
        entropy: bool,
        top_k: int | None = None,
        counted: Tensor | None = None,
    ) -> tuple[TokenScores, RouterLoads | None]:
        inner = self.unwrap(model)
        counted = batch.sampled_lengths > 0 if counted is None else counted
        blank = self.blank is not None and not any(batch.media or ())
        if blank and self.blank is not None:
            batch, counted = with_blank(batch, self.blank), torch.cat([counted, counted.new_zeros(1)])
        inputs = LAYOUTS[layout](batch, self.pad_token_id)
        shown: AbstractContextManager[dict[str, Any]] = nullcontext(inputs.kwargs)
        if self.vision:
            shown = inputs_with_media(inner, inputs.kwargs, batch, self.pad_token_id)
        use_attention_of(layout, inner)
        learned = batch.sampled.nonzero()[:, 0]
        head = head_of(inner, float32=self.float32_head)
        wanted = inputs.predictors[learned]
        score = partial(
            score_hidden,
            targets=batch.token_ids[learned],
            temperature=self.temperature,
            entropy=entropy,
            chunk_size=self.chunk_size,
        )
        tapped: AbstractContextManager[list[Tensor]] = nullcontext([])
        if top_k is not None:
            tapped = captured_router_logits(inner)
        # A compiled model would be compiled anew for every pass.
        once = encoded_once(inner) if self.vision and not hasattr(model, "_orig_mod") else nullcontext()
        with tapped as routed, shown as kwargs, once:
            if self.inside:

                def answer(hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> TokenScores:
                    logprobs, entropies = score(hidden.flatten(0, 1)[wanted], head=replace(head, forward=forward))
                    # Behind the image of the blank row is a gradient of 0, which others take part in as well.
                    return TokenScores(logprobs + 0.0 * hidden[-1].sum() if blank else logprobs, entropies)

                scores = scores_inside(model, head.module, answer, **kwargs)
            else:
                with capture_decoder_output(inner) as captured:
                    # The model is called whole, so that wrappers see their forward pass; its head sees one position.
                    model(**kwargs, use_cache=False, logits_to_keep=1)
                scores = score(captured[0].flatten(0, 1)[wanted], head=head)
        loads = None
        if top_k is not None:
            refuse_without_gradient(inner, routed)
            loads = loads_of(routed, inputs.readers(counted.float()), top_k)
        return scores if len(learned) == batch.num_tokens else scores.among(learned, batch.num_tokens), loads

    @torch.no_grad()
    def _prove(self, inner: Any, device: torch.device) -> str:
        """On a few rollouts: the head is understood, and the layout agrees with the padded one."""
        few = made_up_rollouts(inner.config, device)
        with inference_mode_of(inner):
            _check_head(inner, LAYOUTS["padded"](few, self.pad_token_id).kwargs, self.float32_head, self.inside)
            return choose_layout(
                self._wanted,
                inner,
                lambda layout, batch: self._score(inner, batch, layout, entropy=False)[0].logprobs,
                device,
            )


@contextmanager
def inputs_with_media(
    model: Any, kwargs: dict[str, Any], batch: TrainBatch, pad_token_id: int
) -> Iterator[dict[str, Any]]:
    """Inputs of padded rows with the images that they show, for a model that runs within this context.

    Positions are left to the model, which knows those of images.

    Args:
        model: unwrapped.
        kwargs: of padded rows, one for each rollout of the batch.
        batch: whose images they show.
        pad_token_id: stands in for sampled tokens that look like images.
    """
    ids: Tensor = kwargs["input_ids"]
    media = batch.media or [()] * len(batch)
    strays = stray_placeholders(ids, media, torch.tensor(placeholder_ids(model.config), device=ids.device))
    with reading(model.get_input_embeddings(), ids, strays, pad_token_id) as read:
        shown = media_inputs(media, ids.shape[1], ids.device)
        yield {"input_ids": read, "attention_mask": kwargs["attention_mask"], **shown}


def with_blank(batch: TrainBatch, blank: Rollout) -> TrainBatch:
    """A batch of text with one more row at its end: a prompt that shows an image, and no completion."""
    device = batch.lengths.device
    ids = torch.tensor(blank.prompt_ids, device=device)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return replace(
        batch,
        lengths=torch.cat([batch.lengths, zero]),
        prompt_ids=torch.cat([batch.prompt_ids, ids]),
        prompt_lengths=torch.cat([batch.prompt_lengths, zero + len(ids)]),
        groups=torch.cat([batch.groups, zero + len(batch.prompt_lengths)]),
        media=[*([()] * len(batch)), blank.media],
    )


def first_and_last(batch: TrainBatch) -> Tensor:
    """Up to four rollouts to learn from, [rows]: two from either end, so siblings and strangers if there are both."""
    filled = batch.sampled_lengths.nonzero()[:, 0]
    return torch.cat([filled[:2], filled[2:][-2:]])


def use_attention_of(layout: str, model: Any) -> None:
    """Switch the model to packed attention where the layout needs it.

    It stays, as backward passes may recompute layers. Calls that name no lengths are plain SDPA under it.
    """
    if layout != "padded" and model.config._attn_implementation != PACKED_ATTENTION:
        model.set_attn_implementation(PACKED_ATTENTION)


def _check_head(model: Any, inputs: dict[str, Any], float32: bool, inside: bool) -> None:
    """The head as we apply it must give the model's own logits.

    Raises:
        ValueError: it does not.
    """
    head, ours = head_of(model, float32=float32), []
    if inside:

        def answer(hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> TokenScores:
            ours.append(replace(head, forward=forward)(hidden[:, -1]).float())
            return TokenScores(ours[0], None)

        scores_inside(model, head.module, answer, **inputs)
        theirs = model(**inputs, use_cache=False).logits[:, -1].float()
    else:
        with capture_decoder_output(model) as captured:
            theirs = model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        ours.append(head(captured[0][:, -1]).float())
    difference = (ours[0] - theirs).abs().max().item()
    if difference > 1e-2 * max(1.0, theirs.abs().max().item()):
        raise ValueError(
            f"{name_of(model)} turns hidden states into logits in a way Covey does not know (they differ by"
            f" {difference:.2g}). Supported: a linear head, logit scaling, soft-capping. Please report the model."
        )


@contextmanager
def capture_decoder_output(model: Any) -> Iterator[list[Tensor]]:
    """Collect the decoder's last hidden state [rows, width, H] of the forward passes within."""
    captured: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        captured.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    handle = decoder_of(model).register_forward_hook(keep)
    try:
        yield captured
    finally:
        handle.remove()
