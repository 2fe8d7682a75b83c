"""Routes of a model that is a mixture of experts: read in a forward pass, or forced in one (routing replay).

A router chooses with `torch.topk` among the scores of its experts. This one call is intercepted in the router's forward
pass: its experts are recorded, or replaced by those of a given route, with the current scores of these experts. The
router's own code computes everything else from current logits, such as weights that add up to 1, so the gradient
through the gate is exact and only the ids are fixed. To add a model, add the class of its router to `ROUTERS`. Routes
are stored as described in `covey.core.routes`.

Routing replay in the update: R2 repeats the choices of the old policy in the trainer (GSPO, arXiv 2507.18071, section
5.3), R3 repeats those of the engine (arXiv 2510.11370).
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from covey.core.findings import CheckError
from covey.core.model import decoder_of, name_of, without_adapter
from covey.core.routes import NONE, RouteShape, are_known


class Choice(NamedTuple):
    """Names of the attributes of a router that hold its number of experts and the number chosen for a token."""

    experts: str = "num_experts"
    top_k: str = "top_k"


ROUTERS = dict.fromkeys(
    (
        *("MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "GptOssTopKRouter"),
        *("FlexOlmoTopKRouter", "MiniMaxTopKRouter", "Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter"),
        *("DeepseekV3TopkRouter", "DeepseekV2TopkRouter", "Dots1TopkRouter", "ExaoneMoeTopkRouter"),
        *("Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter", "SolarOpenTopkRouter", "MiMoV2FlashTopkRouter"),
    ),
    Choice(),
)
"""Routers of transformers by the name of their class. Some choose groups of experts first; only the last choice, among
all experts, is recorded and replayed."""

_TOP_K = (torch.topk, Tensor.topk)


@dataclass
class RouteReading:
    """Routes of a forward pass, filled in when the pass has ended."""

    taken: Tensor | None = None  # [T, L, k] experts of each position, of `RouteShape.dtype`; None unless asked for
    # [L] number of forced positions at which a layer's router would have chosen other experts, and the number of forced
    # positions (scalar); None in a pass without a given route
    replaced: Tensor | None = None
    forced: Tensor | None = None


class _Chooses(TorchFunctionMode):
    """Context of one router's forward pass that replaces its choice by given ids [T, k] (-1: leave the router's)."""

    def __init__(self, experts: int, top_k: int, given: Tensor | None):
        super().__init__()
        self._experts, self._top_k, self._given = experts, top_k, given
        self.own: list[Tensor] = []  # ids [T, k] of each choice: one is expected
        self.taken: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K or not self._is_choice(*args, **(kwargs or {})):
            return result
        scores, ids = args[0], result.indices
        self.own.append(ids)
        self.taken = ids
        if self._given is None:
            return result
        self.taken = torch.where(self._given < 0, ids, self._given)
        return torch.return_types.topk((scores.gather(-1, self.taken), self.taken))

    def _is_choice(self, scores: Any, k: Any = None, *args: Any, **kwargs: Any) -> bool:
        """True for a choice of k experts among all, False for a choice of groups."""
        return k == self._top_k and scores.dim() == 2 and scores.shape[-1] == self._experts


@dataclass(eq=False)
class Routing:
    """The routers of one model. The first `passing` replaces their forward methods by `run`.

    Outside of `passing` they work as before, except that layers recomputed in a backward pass (gradient checkpointing)
    get the routes of the last forward pass with gradient.
    """

    shape: RouteShape
    routers: list[nn.Module]
    _attached: bool = field(default=False, init=False)
    _given: Tensor | None = field(default=None, init=False)  # [T, L, k] forced in the current or the last pass
    _under_way: bool = field(default=False, init=False)
    _taken: list[Tensor | None] = field(default_factory=list, init=False)  # L of [T, k]
    _own: list[Tensor | None] = field(default_factory=list, init=False)  # the same, as the routers would have chosen

    def __deepcopy__(self, memo: dict[int, Any]) -> "Routing":
        """The routing of a copied model, outside of any forward pass."""
        memo[id(self)] = copied = Routing(self.shape, [])
        copied.routers += [copy.deepcopy(router, memo) for router in self.routers]
        copied._attached = self._attached
        return copied

    @contextmanager
    def passing(self, given: Tensor | None = None, writes: bool = True) -> Iterator[RouteReading]:
        """Context of one forward pass, whose routes it reads; where `given` [T, L, k] is known, it forces them.

        `writes=False` leaves `RouteReading.taken` None. CheckError if some router was not called, or did not choose
        with one `torch.topk`; RuntimeError if `given` has another number of positions than the pass.
        """
        for number, router in enumerate(self.routers) if not self._attached else ():
            router.forward = partial(self.run, number, router.forward)
        self._attached = True
        before, self._given, self._under_way = self._given, given, True
        self._taken, self._own = [None] * len(self.routers), [None] * len(self.routers)
        found = RouteReading()
        try:
            yield found
            self._read(found, writes)
        finally:
            self._under_way, self._taken, self._own = False, [], []
            if not torch.is_grad_enabled():  # no backward pass follows, and one of an earlier pass may
                self._given = before

    def _read(self, found: RouteReading, writes: bool) -> None:
        calls = [taken for taken in self._taken if taken is not None]
        if len(calls) < len(self.routers):
            missing = self.routers[self._taken.index(None)]
            raise CheckError.of(
                "model-routes",
                f"{len(self.routers) - len(calls)} of {len(self.routers)} routers ({type(missing).__name__}) were not"
                " called in a forward pass: other code computes the experts, such as a kernel of their whole layer.",
                "Load the model without such kernels, or leave routing_replay unset.",
            )
        device = calls[0].device
        if writes:
            found.taken = torch.stack([self.shape.stored(taken.to(device)) for taken in calls], dim=1)
        if self._given is not None:
            known = are_known(self._given).to(device)
            changed = [
                (own.sort(-1).values != taken.sort(-1).values).any(-1).to(device)
                for own, taken in zip(self._own, self._taken, strict=True)
                if own is not None and taken is not None
            ]
            found.replaced, found.forced = torch.stack([(one & known).sum() for one in changed]), known.sum()

    def run(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a layer's router, recording or forcing its choice inside `passing`."""
        again = not self._under_way and self._given is not None and torch._C._current_graph_task_id() != -1
        if not (self._under_way or again):
            return forward(*args, **kwargs)
        router, hidden = self.routers[layer], args[0] if args else next(iter(kwargs.values()))
        choice, given = ROUTERS[_router_class(router) or ""], None
        if self._given is not None:
            stored = self._given[:, layer].to(hidden.device)
            given = stored.long().masked_fill(stored == NONE[stored.dtype], -1)
            if len(given) != (tokens := hidden.numel() // hidden.shape[-1]):
                raise RuntimeError(f"routes of {len(given)} tokens cannot be replayed in a forward pass over {tokens}")
        with _Chooses(getattr(router, choice.experts), getattr(router, choice.top_k), given) as chooses:
            result = forward(*args, **kwargs)
        if len(chooses.own) != 1:
            raise CheckError.of(
                "model-routes",
                f"{type(router).__name__} called `torch.topk` over all of its experts {len(chooses.own)} times in a"
                " forward pass; routes can be read only if it does so once.",
                "Please report the model, and leave routing_replay unset.",
            )
        if not again:
            self._taken[layer], self._own[layer] = chooses.taken, chooses.own[0]
        return result


_known: "WeakKeyDictionary[nn.Module, Routing | None]" = WeakKeyDictionary()


def routing_of(model: Any) -> Routing | None:
    """The routers of a model, its wrappers removed; None if it has none that `ROUTERS` knows."""
    model = without_adapter(model)
    if model not in _known:
        _known[model] = _find(model)
    return _known[model]


def _find(model: Any) -> Routing | None:
    decoder = decoder_of(model)
    found: list[tuple[int, nn.Module]] = []
    for name, module in decoder.named_modules():
        if _router_class(module) is not None:
            number = re.search(r"layers\.(\d+)\.", f"{name}.")
            found.append((int(number.group(1)) if number else len(found), module))
    if not found:
        return None
    layers, routers = tuple(layer for layer, _ in found), [module for _, module in found]
    sizes = {(getattr(r, c.experts), getattr(r, c.top_k)) for r in routers for c in [ROUTERS[_router_class(r) or ""]]}
    if len({top_k for _, top_k in sizes}) > 1:
        return None  # layers with different numbers of experts of a token
    hidden = getattr(model.config.get_text_config(), "num_hidden_layers", 0) or max(layers) + 1
    shape = RouteShape(layers, int(hidden), max(experts for experts, _ in sizes), sizes.pop()[1])
    return Routing(shape, routers)


def _router_class(module: nn.Module) -> str | None:
    """Name of a known router's class; a sharded module's is a subclass of it."""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in ROUTERS), None)


def unknown_routers(model: Any) -> list[str]:
    """Names of module classes of a model that look like routers and are not in `ROUTERS`."""
    names = {type(module).__name__ for module in decoder_of(model).modules()}
    return sorted(name for name in names if re.search(r"(Router|TopK\w*Gate|MoeGate)$", name) and name not in ROUTERS)


def check_routing(model: Any, given: str) -> Routing:
    """The routers of a model; CheckError if none of its modules is in `ROUTERS`. `given` names the setting."""
    routing = routing_of(model)
    if routing is not None:
        return routing
    others = unknown_routers(model)
    if others:
        evidence = f"{given}: the routers of {name_of(model)} ({', '.join(others)}) are not supported."
        fix = "Leave routing_replay unset, or add their class to `ROUTERS` in covey.core.routing."
    else:
        evidence = f"{given}: {name_of(model)} is not a mixture of experts, so there are no routes to replay."
        fix = "Leave routing_replay unset; it is for mixtures of experts (Mixtral, Qwen3-MoE, OLMoE, gpt-oss, ...)."
    raise CheckError.of("model-routes", evidence, fix)
