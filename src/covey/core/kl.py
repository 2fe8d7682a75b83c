"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. All take flat `[N]` vectors
and return `[N]`; the gradient flows through `logprobs`.
"""

from collections.abc import Callable

from torch import Tensor

KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(p/q): unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log(p/q))² / 2: biased, low variance, and its gradient is the true KL's on-policy."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - log(q/p) - 1: unbiased, low variance, never negative (DeepSeekMath, arXiv 2402.03300, eq. 4)."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}
