"""Engine that samples one prompt at a time: for linear attention, state spaces, hybrids, ALiBi and images.

Prompts of different lengths cannot be in one batch here: a recurrent state cannot be masked, padded or shared in part,
ALiBi's biases (BLOOM) are computed from the mask of a whole sequence, and only the model can compute the positions of
images. So each prompt is computed once, with its images; its state is copied for every completion, and its completions
are decoded together until they are finished. Drafts are ignored, because a state cannot be rolled back. The engine
shares the policy's memory. See also `engine`, the default.
"""

import asyncio
import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.core.engine import SampleRequest
from covey.core.model import cache_argument, image_inputs, without_adapter
from covey.core.records import Completion
from covey.core.routing import RouteReading, check_routing
from covey.engines.native.inference_contexts import PolicyEngine
from covey.engines.native.invariance import InvariantFunctions
from covey.engines.native.sampling import Batch, SequenceState, sequences_of

MASKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types without a state that need only a mask by distance between tokens (unlike chunked attention)."""


def needs_recurrent_engine(model: Any) -> bool:
    """True if sequences cannot be masked individually: the model has a state, or reads the mask of whole sequences."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    biased = getattr(config, "alibi", False) or config.model_type == "bloom"
    return bool(biased or getattr(model, "_is_stateful", False)) or not MASKABLE_LAYERS.issuperset(layer_types)


@dataclass(eq=False, kw_only=True)
class RecurrentEngine(PolicyEngine):
    """Samples from a transformers causal language model with the model's own cache, one prompt at a time."""

    filler_id: int = 0  # any token that is not an image placeholder

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt; drafts are ignored, which changes no sample."""
        sequences = sequences_of(request, self.eos_token_ids, self.max_context, True, self.tokenizer)
        for start in range(0, len(sequences), self.max_sequences):
            self._sample(sequences[start : start + self.max_sequences])
            await asyncio.sleep(0)  # waiters for finished completions run
        return [sequence.done.result() for sequence in sequences]

    def _sample(self, sequences: list[SequenceState]) -> None:
        device = self.input_device
        logits, cache, routes = self._prefill(sequences[0].request, device)
        if routes is not None:
            for sequence in sequences:
                sequence.routes.append(routes)
        cache.reorder_cache(torch.zeros(len(sequences), dtype=torch.int64, device=device))
        batch = Batch(sequences, device)
        batch.sample(logits.expand(len(sequences), -1))
        while True:
            if batch.has_ended():
                batch.flush()
                unfinished = [i for i, sequence in enumerate(sequences) if sequence.finish is None]
                for sequence in sequences:
                    sequence.resolve()
                if not unfinished:
                    return
                cache.reorder_cache(torch.tensor(unfinished, device=device))
                sequences = [sequences[i] for i in unfinished]
                batch = Batch(sequences, device)
            logits, cache, routes = self._forward(batch.last[:, None], cache, sequences[0].request.params.keep_routes)
            batch.sample(logits, routes)

    def _prefill(self, request: SampleRequest, device: torch.device) -> tuple[Tensor, Any, Tensor | None]:
        """Forward pass over a prompt and its images: logits of its last position [1, V], the cache, and experts."""
        model = self._model()
        for module in model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None  # position offsets of the images of an earlier forward pass
        tokens = torch.tensor([request.prompt_ids], device=device)
        keeps = request.params.keep_routes
        if not request.media:
            return self._forward(tokens, None, keeps)
        with image_inputs(model, tokens, [request.media], self.filler_id) as inputs:
            return self._forward(inputs.pop("input_ids"), None, keeps, **inputs)

    def _forward(
        self, tokens: Tensor, cache: Any, keeps_routes: bool, **images: Tensor
    ) -> tuple[Tensor, Any, Tensor | None]:
        """Forward pass over tokens [S, T] behind a cache: logits of the last position [S, V], the cache, and the
        experts [S * T, L, k] of the tokens, where they are kept."""
        model = self._model()
        name = cache_argument(model)
        takes = inspect.signature(without_adapter(model).forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        given = {name: cache} if name in takes else {}
        invariant = InvariantFunctions() if tokens.device.type == "cpu" else nullcontext()
        reading: AbstractContextManager[RouteReading | None] = nullcontext()
        if keeps_routes:
            reading = check_routing(model, "keep_routes=True").passing()
        with invariant, reading as read:
            output = model(input_ids=tokens, use_cache=True, **given, **last, **images)
        after = output.get(name)
        if not hasattr(after, "reorder_cache"):
            raise ValueError(
                f"{type(model).__name__} returns a cache without `reorder_cache` ({type(after).__name__}),"
                " which cannot be copied for a prompt's completions. Sample from a server of vLLM or SGLang, or train"
                " another model."
            )
        return output.logits[:, -1], after, None if read is None else read.taken
