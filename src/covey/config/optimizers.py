"""Names of optimizers, and checks of those that transformers does not have."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers.training_args import OptimizerNames

from covey.config.fields import Args
from covey.config.hardware import by_deepspeed
from covey.config.messages import closest
from covey.core.findings import Finding

STOCHASTIC = "adamw_stochastic"
OWN_OPTIMIZERS = ("muon", STOCHASTIC)
"""Names in `optim` of optimizers that transformers does not have."""
OPTIMIZERS = (*(str(one.value) for one in OptimizerNames), *OWN_OPTIMIZERS)
MUON_SINCE = "2.9"  # version of torch that has Muon

Read = Callable[[str], Any]


def _switch(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _adjustment(text: str) -> str:
    return {"match_rms_adamw": "match_rms_adamw", "original": "original"}[text]


MUON_ARGUMENTS: dict[str, Read] = {
    "momentum": float,
    "nesterov": _switch,
    "ns_steps": int,
    "adjust_lr_fn": _adjustment,
}
"""What `optim_args` may hold with optim='muon', and how each is read."""


def name_of(args: Any) -> str:
    """The word in `optim`, which transformers makes a member of an enumeration of its own words."""
    return str(getattr(args.optim, "value", args.optim))


def read_arguments(text: str | None, known: Mapping[str, Read]) -> dict[str, Any]:
    """Arguments of an optimizer from `optim_args`, 'a=1,b=2'; ValueError or KeyError for one that cannot be read."""
    pairs = [part.partition("=") for part in (text or "").replace(" ", "").split(",") if part]
    return {name: known[name](value) for name, _, value in pairs}


def check_own(args: Args) -> Iterator[Finding]:
    """Errors of optimizers that transformers does not have: how weights are sharded, and arguments."""
    name = name_of(args)
    if name not in OWN_OPTIMIZERS:
        return
    if args.deepspeed or by_deepspeed():
        reason = {
            "muon": "which lays weights end to end in flat vectors, and Muon needs matrices.",
            STOCHASTIC: "which keeps float32 copies of the weights, so that nothing is rounded away.",
        }[name]
        yield Finding.error(
            "optimizer-sharded",
            f"optim={name!r} with DeepSpeed, {reason}",
            "Choose another optimizer, such as adamw_torch, or shard by FSDP2.",
        )
    if name == "muon":
        yield from _check_muon(args)


def _check_muon(args: Args) -> Iterator[Finding]:
    if not hasattr(torch.optim, "Muon"):
        yield Finding.error(
            "setting-word",
            f"optim='muon' is torch's own, since version {MUON_SINCE}, and this is {torch.__version__}.",
            "Upgrade torch, or choose another optimizer.",
        )
    for part in (args.optim_args or "").replace(" ", "").split(","):
        key = part.partition("=")[0]
        if key and key not in MUON_ARGUMENTS:
            known = f"choose among: {', '.join(MUON_ARGUMENTS)}.{closest(key, MUON_ARGUMENTS)}"
            yield Finding.error("setting-word", f"optim_args has {key!r}, which optim='muon' does not know; {known}")
        elif key:
            try:
                read_arguments(part, MUON_ARGUMENTS)
            except (ValueError, KeyError):
                yield Finding.error(
                    "setting-format",
                    f"optim_args={args.optim_args!r} with optim='muon': {part!r} cannot be read.",
                    "Write it like momentum=0.95, nesterov=true, ns_steps=5 or adjust_lr_fn=original.",
                )
