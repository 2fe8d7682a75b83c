"""Trials of a model (its layout, its shared prompts), made once for each tiny model instead of for every trainer.

A trial depends on the model's weights and on plain settings of the object that makes it. Both are compared, and trials
that end in a warning are made every time.
"""

import copy
import functools
from typing import Any

import torch

from covey.engines.native.engine import NativeEngine
from covey.engines.native.packed_weights import PackedPart
from covey.policy.scoring import TokenScorer

_known: dict[Any, Any] = {}


def remember() -> None:
    """Remember trials from now on in this process."""
    _patch(TokenScorer, "_try_layouts", lambda scorer, model, device: model, ["shared_prefix", "packed"], [])
    found = ["_fuses", "_shapes"]
    _patch(NativeEngine, "_objection_to_sharing", lambda engine, dtype, softcap: engine._model(), [None], found)


def _patch(owner: type, name: str, model_of: Any, silent: list[Any], found: list[str]) -> None:
    """Replace a method that tries a model and gives one of `silent`, or warns; it assigns the attributes `found`."""
    trial = getattr(owner, name)

    @functools.wraps(trial)
    def remembered(self: Any, *arguments: Any) -> Any:
        model = model_of(self, *arguments)
        if not _is_plain(model):
            return trial(self, *arguments)
        settings = [
            (field, value) for field, value in vars(self).items() if isinstance(value, bool | int | float | str)
        ]
        key = (name, *settings, *(argument for argument in arguments if argument is not model), *_digest(model))
        if key in _known:
            result, attributes = _known[key]
            vars(self).update(copy.deepcopy(attributes))
            return result
        result = trial(self, *arguments)
        if result in silent:
            _known[key] = result, {attribute: copy.deepcopy(vars(self)[attribute]) for attribute in found}
        return result

    setattr(owner, name, remembered)


def _is_plain(model: torch.nn.Module) -> bool:
    """True where weights and classes say all about a model: no hook, no forward pass of its own, no shards."""
    own = (m._forward_hooks or m._forward_pre_hooks or not _is_usual(vars(m).get("forward")) for m in model.modules())
    return not torch.distributed.is_initialized() and not any(own)


def _is_usual(forward: Any) -> bool:
    """True for no forward pass of a module's own, and for a product with its weights as they are."""
    return forward is None or (isinstance(forward, PackedPart) and forward.product.packed is None)


def _digest(model: torch.nn.Module) -> list[Any]:
    kinds = [type(module) for module in model.modules()]
    weights = [(name, w.dtype, w.shape, w.double().sum().item()) for name, w in model.named_parameters()]
    settings = repr({**vars(model.config), "_name_or_path": ""})  # in a fiftieth of the time that JSON takes
    return [*kinds, model.training, settings, *weights]
