"""Routes of a model that is a mixture of experts: read in a forward pass, or forced in one (routing replay).

A router chooses with `torch.topk` among the scores of its experts. In its forward pass this one call is answered here:
the experts are written down, or those of a route are returned, with their own scores. All that the router makes of
them, such as weights that add up to 1, is its own code on current logits, so the gradient through the gate is exact
and only the ids are fixed. To add a model, add the class of its router to `ROUTERS`. The format: `covey.core.routes`.

Routing replay: GSPO (arXiv 2507.18071, section 5.3) replays in the update what the old policy chose in the trainer
(R2), and R3 (arXiv 2510.11370) what the engine chose.
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
    """Attributes of a router that say how many experts it chooses among, and how many."""

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
"""Routers of transformers by their class. Of the groups of experts that some choose first, nothing is replayed: only
the last choice, among all experts, counts."""

_TOP_K = (torch.topk, Tensor.topk)


@dataclass
class RouteReading:
    """Findings of a forward pass, there once it has ended."""

    taken: Tensor | None = None  # [T, L, k] experts of each position, as `RouteShape.dtype`, where they were asked for
    # [L] positions of a forced route whose router would have chosen other experts, and the number of such positions
    replaced: Tensor | None = None
    forced: Tensor | None = None


class _Chooses(TorchFunctionMode):
    """Answers the choice of one router's forward pass, with given ids [T, k] (-1: its own) or with its own."""

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
        """True for k experts of each token among all, not for groups of them."""
        return k == self._top_k and scores.dim() == 2 and scores.shape[-1] == self._experts


@dataclass(eq=False)
class Routing:
    """The routers of one model, whose forward passes go through `run` from the first pass on that is read.

    Without a pass under way they do what they did. Layers that are computed again in a backward pass get the routes of
    the last pass with gradient.
    """

    shape: RouteShape
    routers: list[nn.Module]
    _attached: bool = field(default=False, init=False)
    _given: Tensor | None = field(default=None, init=False)  # [T, L, k] of the pass under way, or of the last one
    _under_way: bool = field(default=False, init=False)
    _taken: list[Tensor | None] = field(default_factory=list, init=False)  # L of [T, k]
    _own: list[Tensor | None] = field(default_factory=list, init=False)  # the same, as the routers would have chosen

    def __deepcopy__(self, memo: dict[int, Any]) -> "Routing":
        """Routing of a copied model, without a pass under way."""
        memo[id(self)] = copied = Routing(self.shape, [])
        copied.routers += [copy.deepcopy(router, memo) for router in self.routers]
        copied._attached = self._attached
        return copied

    @contextmanager
    def passing(self, given: Tensor | None = None, writes: bool = True) -> Iterator[RouteReading]:
        """Read one forward pass within, forced to the routes `given` [T, L, k] of all its positions where known.

        Without `writes` the routes that were taken are not put together. CheckError where routers were not called.
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
        """The forward pass of a layer's router."""
        again = not self._under_way and self._given is not None and torch._C._current_graph_task_id() != -1
        if not (self._under_way or again):
            return forward(*args, **kwargs)
        router, hidden = self.routers[layer], args[0] if args else next(iter(kwargs.values()))
        choice, given = ROUTERS[_router_class(router) or ""], None
        if self._given is not None:
            stored = self._given[:, layer].to(hidden.device)
            given = stored.long().masked_fill(stored == NONE[stored.dtype], -1)
            if len(given) != (tokens := hidden.numel() // hidden.shape[-1]):
                raise RuntimeError(f"routes of {len(given)} tokens are to be replayed in a pass over {tokens}")
        with _Chooses(getattr(router, choice.experts), getattr(router, choice.top_k), given) as chooses:
            result = forward(*args, **kwargs)
        if len(chooses.own) != 1:
            raise CheckError.of(
                "model-routes",
                f"{type(router).__name__} chose experts {len(chooses.own)} times for a token, in another way than once"
                " with `torch.topk` among all of them.",
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
    """Classes of modules of a model that seem to be routers and are not in `ROUTERS`."""
    names = {type(module).__name__ for module in decoder_of(model).modules()}
    return sorted(name for name in names if re.search(r"(Router|TopK\w*Gate|MoeGate)$", name) and name not in ROUTERS)


def check_routing(model: Any, given: str) -> Routing:
    """The routers of a model for the setting `given`; CheckError for a model without any that are known."""
    routing = routing_of(model)
    if routing is not None:
        return routing
    others = unknown_routers(model)
    if others:
        evidence = f"{given}: the routers of {name_of(model)} ({', '.join(others)}) are none that are known."
        fix = "Leave routing_replay unset, or add their class to `ROUTERS` in covey.core.routing."
    else:
        evidence = f"{given}: {name_of(model)} is no mixture of experts, so there are no routes to replay."
        fix = "Leave routing_replay unset; it is for mixtures of experts (Mixtral, Qwen3-MoE, OLMoE, gpt-oss, ...)."
    raise CheckError.of("model-routes", evidence, fix)
