"""Registration of losses and advantages by name, and checks of what the registered functions return."""

import inspect
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.algorithms.algorithm import LOSS_TYPES, LossType, Members
from covey.core.losses import Surrogate, SurrogateInputs, Weighting, mean_over_update
from covey.runtime.process_memory import is_out_of_memory
from covey.runtime.registry import Registry
from covey.runtime.user_code import format_error, warn


def register_loss(
    name: str,
    surrogate: Surrogate,
    weighting: Weighting = mean_over_update,
    *,
    zero_without_advantage: bool = False,
    entropies: bool = False,
) -> Surrogate:
    """Register a loss under `loss_type=name`.

    Args:
        name: value of `loss_type` in a config.
        surrogate: `SurrogateInputs -> token losses [N]`.
        weighting: an average of `covey.core.losses`, or another function of `BatchCounts`; the token mean by default.
        zero_without_advantage: promise that a token with advantage 0 has loss 0, so that rollouts without a signal
            may be skipped, as with the built-in losses.
        entropies: compute the entropies of tokens, `x.entropies`.

    Returns:
        `surrogate`.

    Raises:
        ValueError: the name is taken. In training: the surrogate fails, or does not return [N] losses with a gradient.
        TypeError: the surrogate cannot be called with one argument.
    """
    _check_call("register_loss", name, surrogate, "SurrogateInputs")
    row = LossType(lambda config: _checked(name, surrogate), weighting, zero_without_advantage=zero_without_advantage)
    LOSS_TYPES.register(name, replace(row, needs_entropies=entropies))
    _SURROGATES[name] = surrogate
    return surrogate


_SURROGATES: dict[str, Surrogate] = {}  # by name, as they were given to `register_loss`


def register_loss_of_file(name: str, surrogate: Surrogate) -> None:
    """Register a loss under `file.py:name`, with the options of its file's `register_loss`, or else the defaults."""
    own = next((one for one, given in _SURROGATES.items() if given is surrogate), None)
    if own is None:
        register_loss(name, surrogate)
    else:
        LOSS_TYPES.register(name, LOSS_TYPES[own])


def _check_call(registers: str, name: str, function: Callable[..., Any], given: str) -> None:
    with suppress(ValueError):  # functions written in C may have no signature
        signature = inspect.signature(function)
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                f"{registers}({name!r}, ...): the function takes {signature}, but is called with one argument, {given}."
            ) from error


def _checked(name: str, surrogate: Surrogate) -> Surrogate:
    """The surrogate with checks of its results: shape, dtype, finite values and, on its first use in training, a
    gradient.
    """
    trains = False

    def checking(x: SurrogateInputs) -> Tensor:
        nonlocal trains
        try:
            losses = surrogate(x)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(f"loss_type={name!r} failed in {_described(error)}{_absent(x, error)}") from error
        given = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        if not isinstance(losses, Tensor) or losses.shape != x.logprobs.shape:
            raise ValueError(
                f"loss_type={name!r} returned {given}; it must return the loss of each token, shape"
                f" {list(x.logprobs.shape)}. The trainer averages them itself."
            )
        if not losses.is_floating_point():
            raise ValueError(f"loss_type={name!r} returned losses of {losses.dtype}; give floating-point numbers.")
        if not trains and torch.is_grad_enabled() and x.logprobs.requires_grad:
            trains = True
            if not losses.requires_grad:
                raise ValueError(
                    f"loss_type={name!r} returned losses without a gradient, so nothing would be trained. Compute them"
                    " from x.ratio, x.log_ratio or x.logprobs, without `detach` or `torch.no_grad`."
                )
        broken = ~losses.isfinite() & x.sampled & (x.logprobs + x.log_ratio).isfinite()
        if broken.any():
            warn(
                f"loss_type={name!r} returned losses that are NaN or infinite for {int(broken.sum())} of"
                f" {int(x.sampled.sum())} tokens, though their log-probs are finite.",
            )
        return losses

    return checking


def _described(error: Exception) -> str:
    """The line of the user's file and its error in one sentence, because the command line shows no traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if "site-packages" not in frame.filename] or frames)[-1]
    return f"line {last.lineno} of {last.filename}: {format_error(error)}."


def _absent(x: SurrogateInputs, error: Exception) -> str:
    """Advice for an error about None: which inputs are None because nothing asked for them, and how to get them."""
    advice = {"entropies": "call register_loss(..., entropies=True)", "ref_logprobs": "set beta above 0"}
    missing = [f" x.{name} is None: {how}." for name, how in advice.items() if getattr(x, name) is None]
    return "".join(missing) if "NoneType" in str(error) else ""


class AdvantageInputs(NamedTuple):
    """Inputs of an advantage, in float64 with NaN for no reward: P prompts, G completions of each, F functions.

    Where `compare` divides prompts, P counts subgroups and G is the size of the largest; others end with rewards of
    NaN, 0 tokens, and -1 for roles and games.
    """

    totals: Tensor  # [P, G] weighted rewards, less the KL penalty where it is part of the reward
    rewards: Tensor  # [P, G, F] rewards of each function
    lengths: Tensor  # [P, G] tokens of each completion
    k: int = 1  # `pass_at_k` of the config
    roles: Tensor = torch.zeros(0, dtype=torch.long)  # [P, G] int64, index of each completion's role in `role_names`
    games: Tensor = torch.zeros(0, dtype=torch.long)  # [P, G] int64, number of its game in its prompt
    role_names: tuple[str, ...] = ("",)  # "": no role


Advantages = Callable[[AdvantageInputs], Tensor]
"""Rewards and lengths -> advantages of completions [P, G], or of each of their tokens [P, G, T]; NaN counts as 0.

T is at least the largest length; values after a completion's last token are not read.
"""

ADVANTAGES: Registry[Advantages] = Registry("advantages")
"""Every value of `advantages` by name; `register_advantages` extends it."""


def register_advantages(name: str, function: Advantages) -> Advantages:
    """Register a function `AdvantageInputs -> advantages`, [P, G] or [P, G, T], under `advantages=name`.

    It is called with the groups of all processes together.

    Returns:
        The function.

    Raises:
        ValueError: the name is taken. In training: the function fails, or returns another shape or an infinite value.
        TypeError: the function cannot be called with one argument.
    """
    _check_call("register_advantages", name, function, "AdvantageInputs")
    return ADVANTAGES.register(name, function)


def registered_advantages(config: Any, totals: Tensor, rewards: Tensor, members: Members) -> Tensor:
    """Advantages [P, G] or [P, G, T], float32, by the function that `config.advantages` names; 0 without a reward.

    ValueError if the function fails, or returns another shape or an infinite value.
    """
    numbers = totals.double(), rewards.double(), members.lengths.double()
    x = AdvantageInputs(*numbers, config.pass_at_k, members.roles, members.games, members.role_names)
    try:
        found = ADVANTAGES[config.advantages](x)
    except Exception as error:
        raise ValueError(f"advantages={config.advantages!r} failed in {_described(error)}") from error
    longest = int(members.lengths.max()) if members.lengths.numel() else 0
    of_tokens = isinstance(found, Tensor) and found.dim() == 3 and found.shape[2] >= longest
    if not isinstance(found, Tensor) or found.shape[: 2 if of_tokens else None] != totals.shape:
        given = f"shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(
            f"advantages={config.advantages!r} returned {given}, but must return a tensor with the advantage of"
            f" each completion, shape {list(totals.shape)}, or of each token, shape {[*totals.shape, longest]}."
        )
    found = found.float()
    if found.isinf().any():
        raise ValueError(
            f"advantages={config.advantages!r} returned an infinite advantage; it must return finite numbers, and 0 or"
            " NaN where there is no advantage."
        )
    unknown = totals.isnan()[..., None] if of_tokens else totals.isnan()
    return torch.where(unknown, 0.0, found).nan_to_num(0.0)
