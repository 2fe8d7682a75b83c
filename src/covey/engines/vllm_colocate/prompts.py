"""Prompts of a vLLM in this process: tokens and images.

vLLM gets each image as a single token and expands it with its own processor, so its tokens are compared with those of
the trainer's processor.
"""

from collections.abc import Sequence
from typing import Any

from covey.core.engine import SampleRequest
from covey.core.records import images_of, unexpanded


def prompt_of(request: SampleRequest) -> dict[str, Any]:
    """Prompt of a request, for `vllm.LLMEngine.add_request`."""
    if not request.media:
        return {"prompt_token_ids": request.prompt_ids}
    ids = unexpanded(request.prompt_ids, request.media)
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images_of(request.media)}}


def expansion_error(ours: Sequence[int], theirs: Sequence[int]) -> RuntimeError | None:
    """Error if vLLM has expanded a prompt to other tokens (`theirs`) than the trainer's processor (`ours`)."""
    if list(ours) == list(theirs):
        return None
    shorter = min(len(ours), len(theirs))
    first = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    return RuntimeError(
        f"vLLM expands a prompt with images to {len(theirs)} tokens, and the trainer's processor to {len(ours)};"
        f" they differ from token {first} on. If vllm_engine_kwargs has mm_processor_kwargs, leave them out: vLLM's"
        " processor has the settings of the trainer's."
    )
