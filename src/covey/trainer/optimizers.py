"""The optimizer that the config names: one of transformers', or one of Covey's own."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Trainer

from covey.config.base import OnlineConfig
from covey.config.optimizers import MUON_ARGUMENTS, STOCHASTIC, name_of, read_arguments
from covey.core.findings import Finding
from covey.policy.optimizers import Muon, StochasticAdamW, hidden_matrices
from covey.policy.precision import held_in_half

Made = tuple[type[Any], dict[str, Any]]
"""Class of an optimizer, which is called with groups of parameters, and its other arguments."""


def optimizer_of(args: Any, model: Any = None) -> Made:
    """Class and arguments of the optimizer that `args.optim` names.

    Raises:
        ValueError: it needs the model, and none was given; or transformers does not have it.
    """
    make = OWN.get(name_of(args))
    return Trainer.get_optimizer_cls_and_kwargs(args, model) if make is None else make(args, model)


def _adamw(args: OnlineConfig) -> dict[str, Any]:
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def _muon(args: OnlineConfig, model: Any) -> Made:
    if model is None:
        raise ValueError("optim='muon' sorts the weights of a model: give `model`.")
    hidden = [id(weight) for weight in hidden_matrices(model)]
    return Muon, {**_adamw(args), "hidden": hidden, "fused": True, **read_arguments(args.optim_args, MUON_ARGUMENTS)}


def _stochastic(args: OnlineConfig, model: Any) -> Made:
    return StochasticAdamW, {**_adamw(args), "seed": args.seed}


OWN: dict[str, Callable[[OnlineConfig, Any], Made]] = {"muon": _muon, STOCHASTIC: _stochastic}
"""Optimizers by their names in `optim`; `covey.config.optimizers` lists them."""


def check_optimizer_kind(args: OnlineConfig, policy: Any) -> Iterator[Finding]:
    """Warnings of an optimizer of Covey's own that treats all weights of this model as AdamW does."""
    name = name_of(args)
    if name == "muon" and not any(True for _ in hidden_matrices(policy)):
        evidence = "optim='muon' moves no weight by Muon: none that is trained is a matrix of a hidden layer."
        yield Finding.warning("setting-unread", evidence, "Set optim='adamw_torch'.")
    if name == STOCHASTIC and not any(weight.dtype == torch.bfloat16 for weight in held_in_half(policy)):
        yield Finding.warning(
            "setting-unread",
            f"optim={STOCHASTIC!r} rounds nothing: no weight that is trained is held in bfloat16.",
            "Set optim='adamw_torch', or load the model with model_init_kwargs={'dtype': 'bfloat16'}.",
        )
