"""Whether an engine samples from the policy at all: its log-probs against the scorer's."""

from torch import Tensor

from covey.core.batch import TrainBatch


def check_parity(batch: TrainBatch, scored: Tensor, model_name: str, *, tolerance: float) -> None:
    """Compare what the engine and the scorer say of the same tokens.

    Args:
        batch: rollouts with `engine_logprobs` [N].
        scored: [N], the policy's own log-probs.
        model_name: for the message.
        tolerance: largest mean difference in nats.

    Raises:
        ValueError: they differ by more, so the engine does not sample from the policy.
    """
    assert batch.engine_logprobs is not None, "an engine that reports no log-probs cannot be checked"
    if not batch.sampled.any():
        return
    gap = (scored - batch.engine_logprobs)[batch.sampled].abs().mean().item()
    if gap > tolerance:
        raise ValueError(
            f"the engine's log-probs differ from the model's own by {gap:.2g} on average, so {model_name} is not"
            " sampled from as it is. Its attention is of a kind the built-in engine does not know; please report"
            " the model."
        )
