"""What the engines in the trainer's process ask of a request. Not here: servers, which answer for themselves."""

from covey.core.engine import SampleRequest


def budget_of(request: SampleRequest, max_context: int | None) -> int:
    """Tokens each completion may have."""
    wanted = request.params.max_tokens
    return wanted if max_context is None else max(1, min(wanted, max_context - len(request.prompt_ids)))


def check_request(request: SampleRequest, images: bool = False) -> None:
    """Settings and drafts must be ones that the engines in the trainer's process know.

    Args:
        request: to be sampled.
        images: whether the engine can show them.

    Raises:
        ValueError: they are not, or there are images that it cannot show.
    """
    if request.params.extra:
        raise ValueError(
            f"the native engine does not know the generation settings {sorted(request.params.extra)}; it knows"
            " temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens."
        )
    if request.media and not images:
        raise ValueError("the native engine samples text only; images need a vision-language engine.")
    for name, given in (("drafts", request.drafts), ("draft_logprobs", request.draft_logprobs)):
        if given is not None and len(given) != len(request.seeds):
            raise ValueError(
                f"{name} holds {len(given)} lists for {len(request.seeds)} seeds; give one (or None) each."
            )
    if request.drafts and request.draft_lenience is not None:
        recorded = request.draft_logprobs or [None] * len(request.drafts)
        for draft, logprobs in zip(request.drafts, recorded, strict=True):
            if draft and len(logprobs or []) != len(draft):
                raise ValueError(
                    f"draft_lenience needs the log-prob of every draft token, and a draft of {len(draft)} tokens has"
                    f" {len(logprobs or [])}. Give draft_logprobs, or leave draft_lenience None to verify exactly."
                )
