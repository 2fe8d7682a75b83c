"""Selection of a model's layout: the fastest that gives the log-probs of padded rows, found by trials.

Once for every model, separately for policy and reference. The trials use synthetic rollouts, so they do not depend on
sampled data: all processes run the same forward passes, and single rollouts can be packed too.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.batch import TrainBatch
from covey.core.model import decoder_of, name_of, sdpa_suits
from covey.policy.attention import PACKED_ATTENTION
from covey.runtime.process_memory import is_out_of_memory

ROW_LAYOUTS = ("shared_prefix", "packed")
"""Layouts that put many sequences in one row, fastest first."""

LONGEST_WINDOW = 512
"""Longest sliding window that trials exceed; the layouts treat longer ones no differently."""

LAYOUTS_BY_SPEED = (*ROW_LAYOUTS, "padded")
"""All layouts, fastest first; a model that one of them suits is also suited by those after it."""

Score = Callable[[str, TrainBatch], Tensor]
"""(layout, batch) -> the model's log-probs [N] in that layout."""


def choose_layout(wanted: str, model: Any, score: Score, device: torch.device) -> str:
    """Choose the layout to score a model in.

    Args:
        wanted: "auto", or a name that the user insists on.
        model: unwrapped, in inference mode.
        score: scores a batch with the model.
        device: of the model's inputs.

    Raises:
        ValueError: the user insists on a layout that gives wrong log-probs.
    """
    if wanted == "padded":
        return wanted
    if wanted != "auto":
        _check_insisted(wanted, model, score, device)
        return wanted
    chosen = model.config._attn_implementation
    if not _replaceable(model, chosen):
        if chosen != "eager":
            _warn(
                f"{name_of(model)} runs with attn_implementation='{chosen}', as was asked for, so it is scored"
                " with padded rows. Leave it out to let completions share their prompt, or set attn_layout='padded' to"
                " silence this."
            )
        return "padded"
    reasons = []
    expected, noise = _padded_scores(model, score, device)
    for layout in ROW_LAYOUTS:
        reason = _objection(layout, model, score, expected, noise)
        if reason is None:
            return layout
        reasons.append(reason)
    model.set_attn_implementation(chosen)
    _warn(
        f"{name_of(model)} cannot use the packed layouts ({'; '.join(dict.fromkeys(reasons))}); scoring with"
        " padded rows instead. Set attn_layout='padded' to silence this."
    )
    return "padded"


def slowest(layouts: Iterable[str]) -> str:
    """Slowest of the layouts that the processes have found, which suits all of them."""
    return max(layouts, key=LAYOUTS_BY_SPEED.index)


def synthetic_rollouts(config: Any, device: torch.device) -> TrainBatch:
    """Two random completions for each of two prompts, one longer than the window, so that any leak is visible."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    room = (getattr(config, "max_position_embeddings", None) or LONGEST_WINDOW) - 8
    long = max(1, min(window + 5 if window <= LONGEST_WINDOW else 19, room))
    prompts, lengths = torch.tensor([long, min(5, room)]), torch.tensor([7, 4, 6, 3])
    generator = torch.Generator().manual_seed(0)

    def tokens(count: Tensor) -> Tensor:
        return torch.randint(config.vocab_size, (int(count.sum()),), generator=generator)

    return TrainBatch(
        token_ids=tokens(lengths),
        lengths=lengths,
        sampled=torch.ones(int(lengths.sum()), dtype=torch.bool),
        prompt_ids=tokens(prompts),
        prompt_lengths=prompts,
        groups=torch.tensor([0, 0, 1, 1]),
    ).to(device)


def _padded_scores(model: Any, score: Score, device: torch.device) -> tuple[Tensor, float]:
    """Log-probs of padded rows, and their mean change when each rollout is scored alone: rounding."""
    few = synthetic_rollouts(model.config, device)
    expected = score("padded", few)
    alone = torch.cat([score("padded", one) for one in few.split(1)])
    return expected, (alone - expected).abs().mean().item()


def _objection(layout: str, model: Any, score: Score, expected: Tensor, noise: float) -> str | None:
    """Reason why a layout does not suit a model, or None."""
    convolution = _convolution(model)
    if convolution:
        return f"'{convolution}' is a convolution along the row, which mixes neighbouring sequences"
    try:
        actual = score(layout, synthetic_rollouts(model.config, expected.device))
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise  # not the layout's fault
        return f"{layout} fails with {type(error).__name__}: {error}"
    difference = (actual - expected).abs().mean().item()
    # Not "difference > ...", which is False for NaN.
    if not difference <= tolerance(model, noise):
        return f"log-probs differ by {difference:.2g} on average with {layout}, by {noise:.2g} through rounding alone"
    leak = _leak(layout, model, score, actual)
    # Nothing but the changed tokens differs, so most models give the same bits; experts may round differently.
    if not leak <= noise + (1e-6 if _precision(model).itemsize >= 4 else 1e-3):
        return f"log-probs differ by {leak:.2g} on average with {layout} when another rollout of the row changes"
    return None


def _leak(layout: str, model: Any, score: Score, actual: Tensor) -> float:
    """Mean change of the other rollouts' log-probs when only the first one's tokens change."""
    changed = synthetic_rollouts(model.config, actual.device)
    first = int(changed.lengths[0])
    changed.token_ids[:first] = (changed.token_ids[:first] + 1) % model.config.get_text_config().vocab_size
    return (score(layout, changed) - actual)[first:].abs().mean().item()


def _check_insisted(layout: str, model: Any, score: Score, device: torch.device) -> None:
    objection = _objection(layout, model, score, *_padded_scores(model, score, device))
    if objection is None:
        return
    message = f"attn_layout='{layout}' is wrong for {name_of(model)}: {objection}."
    if _precision(model).itemsize < 4 and objection.startswith("log-probs differ"):
        _warn(f"{message} If that is more than half precision explains, set attn_layout='auto' or 'padded'.")
    else:
        raise ValueError(f"{message} Set attn_layout='auto' or 'padded'.")


def tolerance(model: Any, noise: float) -> float:
    """Largest mean difference of log-probs between layouts, in nats, given the model's rounding noise.

    Half precision has a floor: where two experts nearly tie, rounding decides which one a token is routed to.
    """
    return 5 * noise + (1e-5 if _precision(model).itemsize >= 4 else 0.05)


def _precision(model: Any) -> torch.dtype:
    """Floating-point dtype of the model's products, autocast included."""
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


def _replaceable(model: Any, attention: str) -> bool:
    """True when the attention is transformers' default for the model, not the user's choice."""
    if attention == "eager":
        return not sdpa_suits(model)
    return attention in ("sdpa", PACKED_ATTENTION)


def _convolution(model: Any) -> str | None:
    """Name of a one-dimensional convolution in the decoder, as state-space models and hybrids have."""
    return next((name for name, module in decoder_of(model).named_modules() if isinstance(module, nn.Conv1d)), None)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)
