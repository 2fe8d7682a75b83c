"""Scores tokens under a model: the one place where the policy, its old self and its reference are run forward.

`TokenScorer` picks a layout, runs the decoder, takes the hidden states that predict completion tokens and applies the
head to them alone. Not here: what the scores are for.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.modes import inference_mode_of
from covey.policy.attention import PACKED_ATTENTION
from covey.policy.layouts import LAYOUTS
from covey.policy.lm_head import TokenScores, head_of, score_hidden


class TokenScorer:
    """Log-probabilities and entropies of completion tokens.

    Args:
        unwrap: from a (distributed) wrapper to the transformers model inside.
        temperature: divides the logits, as in sampling.
        layout: "auto" takes the fastest that proves right: shared_prefix, packed, padded. A name insists.
        pad_token_id: fills padded rows.
        chunk_size: tokens whose logits live at once.
        float32_head: multiply by the head in float32.
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
    ):
        self.unwrap = unwrap
        self.temperature = temperature
        self.layout = layout
        self.pad_token_id = pad_token_id
        self.chunk_size = chunk_size
        self.float32_head = float32_head
        self._proven = False

    def __call__(self, model: Any, batch: TrainBatch, *, entropy: bool = False) -> TokenScores:
        """Score every completion token of a batch.

        Args:
            model: the policy or the reference, wrapped or not.
            batch: on the model's device.
            entropy: also return entropies.

        Returns:
            logprobs [N] float32 and entropies [N] float32 or None; gradients flow where enabled.
        """
        if not self._proven and len(first_and_last(batch)) > 1:
            self._prove(model, batch)
        # One rollout alone proves nothing about packing, so until there are several, rows are padded.
        return self._score(model, batch, "padded" if self.layout == "auto" else self.layout, entropy)

    @torch.no_grad()
    def split(self, model: Any, batch: TrainBatch, rows: int, *, entropy: bool = False) -> TokenScores:
        """Score without gradient, `rows` rollouts at a time, the model in inference mode."""
        with inference_mode_of(self.unwrap(model)):
            parts = [self(model, part, entropy=entropy) for part in batch.split(rows)]
        if not parts:
            empty = torch.zeros(0, device=batch.token_ids.device)
            return TokenScores(empty, empty if entropy else None)
        joined = torch.cat([part.logprobs for part in parts])
        return TokenScores(
            joined, torch.cat([p.entropies for p in parts if p.entropies is not None]) if entropy else None
        )

    def _score(self, model: Any, batch: TrainBatch, layout: str, entropy: bool) -> TokenScores:
        inner = self.unwrap(model)
        inputs = LAYOUTS[layout](batch, self.pad_token_id)
        use_attention_of(layout, inner)
        with capture_decoder_output(inner) as captured:
            # The model is called whole, so that wrappers see their forward pass; its head sees one position.
            model(**inputs.kwargs, **batch.forward_kwargs, use_cache=False, logits_to_keep=1)
        hidden = captured[0].flatten(0, 1)[inputs.predictors]
        return score_hidden(
            hidden,
            batch.token_ids,
            head_of(inner, float32=self.float32_head),
            temperature=self.temperature,
            entropy=entropy,
            chunk_size=self.chunk_size,
        )

    @torch.no_grad()
    def _prove(self, model: Any, batch: TrainBatch) -> None:
        """On a few rollouts: the head is understood, and a packed layout agrees with the padded one."""
        inner = self.unwrap(model)
        few = batch.select(first_and_last(batch))
        with inference_mode_of(inner):
            _check_head(inner, LAYOUTS["padded"](few, self.pad_token_id).kwargs, self.float32_head)
            if self.layout == "auto":
                self.layout = self._choose(inner, few)
        self._proven = True

    def _choose(self, inner: Any, few: TrainBatch) -> str:
        if inner.config._attn_implementation not in ("sdpa", PACKED_ATTENTION):
            return "padded"  # the user chose an attention that packs in its own way or not at all
        expected = self._score(inner, few, "padded", entropy=False).logprobs
        # In half precision single tokens differ visibly whenever shapes do, so the mean decides.
        exact = inner.dtype.itemsize >= 4 and not torch.is_autocast_enabled(expected.device.type)
        reasons = []
        for layout in ("shared_prefix", "packed"):
            try:
                gaps = (self._score(inner, few, layout, entropy=False).logprobs - expected).abs()
            except (TypeError, ValueError, RuntimeError) as error:
                reasons.append(f"{layout} fails with {type(error).__name__}: {error}")
                continue
            difference, tolerance = (gaps.max().item(), 1e-3) if exact else (gaps.mean().item(), 0.1)
            if difference <= tolerance:
                return layout
            reasons.append(f"log-probs differ by {difference:.2g} with {layout}")
        inner.set_attn_implementation("sdpa")
        return self._fall_back(inner, "; ".join(reasons))

    @staticmethod
    def _fall_back(model: Any, reason: str) -> str:
        warnings.warn(
            f"{type(model).__name__} cannot use the packed layouts ({reason}); scoring with padded rows instead. Set"
            " attn_layout='padded' to silence this.",
            stacklevel=4,
        )
        return "padded"


def first_and_last(batch: TrainBatch) -> Tensor:
    """Up to four rollouts with tokens, [rows]: two from either end, so siblings and strangers where there are both."""
    filled = batch.lengths.nonzero()[:, 0]
    return torch.cat([filled[:2], filled[2:][-2:]])


def use_attention_of(layout: str, model: Any) -> None:
    """Switch the model to packed attention where the layout needs it.

    It stays, as backward passes may recompute layers. Calls that name no lengths are plain SDPA under it.
    """
    if layout != "padded" and model.config._attn_implementation != PACKED_ATTENTION:
        model.set_attn_implementation(PACKED_ATTENTION)


def _check_head(model: Any, inputs: dict[str, Any], float32: bool) -> None:
    """The head as we apply it must give the model's own logits.

    Raises:
        ValueError: it does not.
    """
    with capture_decoder_output(model) as captured:
        theirs = model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1].float()
    ours = head_of(model, float32=float32)(captured[0][:, -1]).float()
    difference = (ours - theirs).abs().max().item()
    if difference > 1e-2 * max(1.0, theirs.abs().max().item()):
        raise ValueError(
            f"{type(model).__name__} turns hidden states into logits in a way Covey does not know (they differ by"
            f" {difference:.2g}). Supported: a linear head, logit scaling, soft-capping. Please report the model."
        )


@contextmanager
def capture_decoder_output(model: Any) -> Iterator[list[Tensor]]:
    """Collect the decoder's last hidden state [rows, width, H] of the forward passes within."""
    captured: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        captured.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    handle = model.get_decoder().register_forward_hook(keep)
    try:
        yield captured
    finally:
        handle.remove()
