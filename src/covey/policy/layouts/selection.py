"""Which layout a model may be scored in: the fastest that gives the padded rows' log-probs, found by trying.

Asked once for every model, policy and reference apart. What is tried are made-up rollouts, so nothing depends on what a
process happened to sample: all processes run the same forward passes and single rollouts can be packed too.
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
"""Sliding windows up to this many tokens are tried out; the layouts treat longer ones no differently."""

LAYOUTS_BY_SPEED = (*ROW_LAYOUTS, "padded")
"""All layouts, fastest first; whatever one of them suits, those after it suit too."""

Score = Callable[[str, TrainBatch], Tensor]
"""(layout, batch) -> the model's log-probs [N] in that layout."""


def choose_layout(wanted: str, model: Any, score: Score, device: torch.device) -> str:
    """The layout to score a model in.

    Args:
        wanted: "auto", or the name that the user insists on.
        model: unwrapped, in inference mode.
        score: runs it.
        device: where its inputs live.

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
    """The layout that suits all processes, where each has found one of its own."""
    return max(layouts, key=LAYOUTS_BY_SPEED.index)


def made_up_rollouts(config: Any, device: torch.device) -> TrainBatch:
    """Random tokens, two siblings for each of two prompts: a leak between any two shows. One outgrows the window."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    room = (getattr(config, "max_position_embeddings", None) or LONGEST_WINDOW) - 8
    long = max(1, min(window + 5 if window <= LONGEST_WINDOW else 19, room))
    prompts, lengths = torch.tensor([long, min(5, room)]), torch.tensor([7, 4, 6, 3])
    chance = torch.Generator().manual_seed(0)

    def tokens(count: Tensor) -> Tensor:
        return torch.randint(config.vocab_size, (int(count.sum()),), generator=chance)

    return TrainBatch(
        token_ids=tokens(lengths),
        lengths=lengths,
        sampled=torch.ones(int(lengths.sum()), dtype=torch.bool),
        prompt_ids=tokens(prompts),
        prompt_lengths=prompts,
        groups=torch.tensor([0, 0, 1, 1]),
    ).to(device)


def _padded_scores(model: Any, score: Score, device: torch.device) -> tuple[Tensor, float]:
    """What padded rows give, and how far that moves, on average, when the same rows are padded otherwise: rounding."""
    few = made_up_rollouts(model.config, device)
    expected = score("padded", few)
    alone = torch.cat([score("padded", one) for one in few.split(1)])
    return expected, (alone - expected).abs().mean().item()


def _objection(layout: str, model: Any, score: Score, expected: Tensor, noise: float) -> str | None:
    """Why a layout does not suit a model, or None."""
    convolution = _convolution(model)
    if convolution:
        return f"'{convolution}' is a convolution along the row, which mixes neighbouring sequences"
    try:
        actual = score(layout, made_up_rollouts(model.config, expected.device))
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise  # says nothing about the layout
        return f"{layout} fails with {type(error).__name__}: {error}"
    difference = (actual - expected).abs().mean().item()
    # Not "difference > ...", which not-a-number would pass.
    if not difference <= tolerance(model, noise):
        return f"log-probs differ by {difference:.2g} on average with {layout}, by {noise:.2g} through rounding alone"
    leak = _leak(layout, model, score, actual)
    # Nothing but the changed tokens differs, so most models give the same bits; experts may round differently.
    if not leak <= noise + (1e-6 if _precision(model).itemsize >= 4 else 1e-3):
        return f"log-probs differ by {leak:.2g} on average with {layout} when another rollout of the row changes"
    return None


def _leak(layout: str, model: Any, score: Score, actual: Tensor) -> float:
    """How far, on average, the other rollouts' log-probs move when the first one's tokens do; nothing else changes."""
    changed = made_up_rollouts(model.config, actual.device)
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
    """How far log-probs may differ on average between layouts, given the model's own rounding noise, in nats.

    Half precision has its own floor: where two experts are nearly tied, rounding decides which one a token goes to.
    """
    return 5 * noise + (1e-5 if _precision(model).itemsize >= 4 else 0.05)


def _precision(model: Any) -> torch.dtype:
    """The floating point type that the model computes in."""
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


def _replaceable(model: Any, attention: str) -> bool:
    """Whether the attention is transformers' default for the model, not the user's wish."""
    if attention == "eager":
        return not sdpa_suits(model)
    return attention in ("sdpa", PACKED_ATTENTION)


def _convolution(model: Any) -> str | None:
    """The name of a one-dimensional convolution in the decoder: state-space models and hybrids have them."""
    return next((name for name, module in decoder_of(model).named_modules() if isinstance(module, nn.Conv1d)), None)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)
