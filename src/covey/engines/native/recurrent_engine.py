"""An engine for models that are sampled prompt by prompt: linear attention, state spaces, hybrids, ALiBi, images.

A state cannot be masked, padded or shared in part, ALiBi's biases (BLOOM) are made of a mask of whole rows, and images
have positions that only the model knows, so prompts of different lengths do not mix: each prompt is computed once, with
its images, its state copied for every completion, and its completions are decoded side by side; those that are finished
leave. It shares the policy's memory. Not here: drafts, which a state cannot be taken back from; the usual engine is
`native`.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from covey.core.engine import EngineTraits, SampleRequest
from covey.core.media import media_inputs, placeholder_ids, reading, stray_placeholders
from covey.core.model_mode import inference_mode_of
from covey.core.rollout import Completion
from covey.core.weights import WeightUpdate
from covey.engines.native.attention import attention_of, own_attention
from covey.engines.native.mkl_linear import packed_linears
from covey.engines.native.requests import budget_of, check_request
from covey.engines.native.sequences import Batch, SequenceState, steps_per_look

KEYS_AND_VALUES = {"full_attention", "sliding_attention"}
"""Kinds of layer that remember nothing else and see what a mask of distances shows (chunks are not of that kind)."""


def goes_prompt_by_prompt(model: Any) -> bool:
    """Whether rows of a model cannot be masked one by one: it has a state, or reads the mask of whole rows itself."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    biased = getattr(config, "alibi", False) or config.model_type == "bloom"
    return bool(biased or getattr(model, "_is_stateful", False)) or not KEYS_AND_VALUES.issuperset(kinds)


class StatefulEngine:
    """Samples from a transformers causal language model with the model's own cache, prompt by prompt.

    Args:
        model: returns the unwrapped model to sample from.
        eos_token_ids: tokens that end a completion.
        max_rows: most completions decoded at once.
        max_context: prompt and completion together stay within this; None when unlimited.
        forward_context: entered around sampling (mixed precision).
        filler_id: any token that stands for no image.
        device: where the model's inputs belong; None: where its weights are.
    """

    traits = EngineTraits(shares_policy=True)

    def __init__(
        self,
        model: Callable[[], Any],
        *,
        eos_token_ids: set[int],
        max_rows: int = 64,
        max_context: int | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        filler_id: int = 0,
        device: torch.device | None = None,
    ):
        self._model = model
        self.eos_token_ids = eos_token_ids
        self.max_rows = max_rows
        self.max_context = max_context
        self._forward_context = forward_context
        self._filler_id = filler_id
        self._device_of_inputs = device

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt; drafts are left unused, which changes no sample.

        Raises:
            ValueError: settings this engine does not know.
        """
        check_request(request, images=True)
        loop = asyncio.get_running_loop()
        budget = budget_of(request, self.max_context)
        rows = [
            SequenceState(request, i, budget, self.eos_token_ids, loop.create_future())
            for i in range(len(request.seeds))
        ]
        for start in range(0, len(rows), self.max_rows):
            self._sample(rows[start : start + self.max_rows])
            await asyncio.sleep(0)  # what waits for finished completions goes on
        return [row.done.result() for row in rows]

    def load_weights(self, update: WeightUpdate) -> None:
        """Nothing to do: the engine samples from the policy's own parameters."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Put the model into inference mode for the duration, and back as it was."""
        model = self._model()
        with (
            inference_mode_of(model),
            torch.no_grad(),
            self._forward_context(),
            packed_linears(model),
            attention_of(model, own_attention(model)),
        ):
            yield

    def _sample(self, rows: list[SequenceState]) -> None:
        """Decode completions of one prompt until all are finished."""
        model = self._model()
        device = self._device_of_inputs or next(model.parameters()).device
        period = steps_per_look(device)
        logits, cache = self._prefill(rows[0].request, device)
        _keep(cache, [0] * len(rows), device)
        batch = Batch(rows, self.eos_token_ids, device, period)
        batch.draw(logits.expand(len(rows), -1))
        while True:
            if batch.has_ended():
                batch.settle()
                going = [place for place, row in enumerate(rows) if row.finish is None]
                for row in rows:
                    if row.finish is not None:
                        row.resolve()
                if not going:
                    return
                _keep(cache, going, device)
                rows = [rows[place] for place in going]
                batch = Batch(rows, self.eos_token_ids, device, period)
            logits, cache = self._forward(batch.last[:, None], cache)
            batch.draw(logits)

    def _prefill(self, request: SampleRequest, device: torch.device) -> tuple[Tensor, Any]:
        """The model over a prompt and its images: logits of its last position [1, V], and the cache."""
        for module in self._model().modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None  # how far images have moved positions, in whatever ran last
        tokens = torch.tensor([request.prompt_ids], device=device)
        if not request.media:
            return self._forward(tokens, None)
        model, shown = self._model(), [request.media]
        strays = stray_placeholders(tokens, shown, torch.tensor(placeholder_ids(model.config), device=device))
        with reading(model.get_input_embeddings(), tokens, strays, self._filler_id) as read:
            return self._forward(read, None, **media_inputs(shown, tokens.shape[1], device))

    def _forward(self, tokens: Tensor, cache: Any, **images: Tensor) -> tuple[Tensor, Any]:
        """The model over tokens [rows, T] behind a cache: logits of the last position [rows, V], and the cache."""
        model = self._model()
        known = inspect.signature(model.get_base_model().forward if hasattr(model, "peft_config") else model.forward)
        name = "past_key_values" if "past_key_values" in known.parameters else "cache_params"
        last = {"logits_to_keep": 1} if "logits_to_keep" in known.parameters else {}
        output = model(
            input_ids=tokens, use_cache=True, **({name: cache} if name in known.parameters else {}), **last, **images
        )
        after = output.get(name)
        if not hasattr(after, "reorder_cache"):
            raise ValueError(
                f"{type(model).__name__} keeps what it has read in a way of its own ({type(after).__name__} as"
                f" `{name}`), which cannot be copied for a prompt's completions. Sample from a server of vLLM or"
                " SGLang, or train another model."
            )
        return output.logits[:, -1], after


def _keep(cache: Any, rows: list[int], device: torch.device) -> None:
    """Rows of a cache, maybe several times each, in the order given."""
    cache.reorder_cache(torch.tensor(rows, device=device))
