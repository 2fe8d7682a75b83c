"""Prompts as vLLM takes them in this process: tokens, and with them the images that they show.

vLLM is given each image as a single token and expands it with a processor of its own, so what it makes of a prompt is
compared with what the trainer's processor made of it. Not here: what servers are sent (`remote.pictures`).
"""

from collections.abc import Sequence
from typing import Any

from covey.core.engine import SampleRequest
from covey.core.media import images_of, unexpanded


def prompt_of(request: SampleRequest) -> dict[str, Any]:
    """A request's prompt, for `vllm.LLMEngine.add_request`."""
    if not request.media:
        return {"prompt_token_ids": request.prompt_ids}
    ids = unexpanded(request.prompt_ids, request.media)
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images_of(request.media)}}


def otherwise_expanded(ours: Sequence[int], theirs: Sequence[int]) -> RuntimeError | None:
    """What is wrong with a prompt that vLLM has expanded; None where nothing is.

    Args:
        ours: tokens that the trainer's processor made.
        theirs: vLLM's.
    """
    if list(ours) == list(theirs):
        return None
    shorter = min(len(ours), len(theirs))
    place = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    return RuntimeError(
        f"vLLM makes {len(theirs)} tokens of a prompt with images of which the trainer's processor makes {len(ours)};"
        f" they differ from token {place} on. If vllm_engine_kwargs holds mm_processor_kwargs, leave them out: vLLM's"
        " processor has the settings of the trainer's."
    )
