"""Optimizers that transformers does not have: Muon for hidden matrices, and AdamW for weights held in bfloat16.

To add one, write a class that takes groups of parameters, and a row in `OWN` of `covey.trainer.optimizers`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

NOISES = 2**16  # number of values of the lower 16 bits of a float32 number, which bfloat16 does not have


def hidden_matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """Trained matrices, except those of embeddings, of the output head, and of adapters of these.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": Muon is for hidden matrices, and
    AdamW for embeddings, the head, vectors and numbers. The two matrices of a LoRA adapter are matrices as well.
    """
    base: Any = getattr(model, "get_base_model", lambda: model)()
    ends = [base.get_input_embeddings(), base.get_output_embeddings()] if hasattr(base, "get_input_embeddings") else []
    ends += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    excluded = {id(weight) for module in ends if module is not None for weight in module.parameters()}
    for weight in model.parameters():
        if weight.requires_grad and weight.ndim == 2 and id(weight) not in excluded:
            yield weight


class Muon(Optimizer):
    """`torch.optim.Muon` for hidden matrices and `torch.optim.AdamW` for all other weights, as one optimizer.

    Muon's update of a matrix is scaled by 0.2 sqrt(max(rows, columns)) (`adjust_lr_fn="match_rms_adamw"`), so that its
    root mean square is that of AdamW's update, and learning rate and weight decay of AdamW fit (Liu et al. 2025, "Muon
    is scalable for LLM training", arXiv 2502.16982, eq. 4).

    Args:
        params: weights or groups of them. A group keeps its settings, such as `weight_decay`.
        hidden: `id` of each weight that Muon updates.
        lr: learning rate of both.
        betas, eps: of AdamW.
        weight_decay: of both, for groups that set none.
        fused: update AdamW's weights in one kernel.
        settings: of `torch.optim.Muon`: momentum, nesterov, ns_steps, adjust_lr_fn.
    """

    def __init__(
        self,
        params: Iterable[Any],
        hidden: Collection[int],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool | None = None,
        **settings: Any,
    ):
        hidden, orthogonal, others = {*hidden}, list[dict[str, Any]](), list[dict[str, Any]]()
        for group in _groups(params):
            for kept, of_muon in ((orthogonal, True), (others, False)):
                if weights := [one for one in group["params"] if (id(one) in hidden) is of_muon]:
                    kept.append({"weight_decay": weight_decay, **group, "params": weights, "muon": of_muon})
        settings = {"adjust_lr_fn": "match_rms_adamw", **settings}
        self._muon = torch.optim.Muon(orthogonal, lr=lr, **settings) if orthogonal else None
        self._adamw = AdamW(others, lr=lr, betas=betas, eps=eps, fused=fused) if others else None
        parts = [part for part in (self._muon, self._adamw) if part is not None]
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Move the weights that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part, of_muon in ((self._muon, True), (self._adamw, False)):
            if part is not None:  # share this optimizer's groups and state, which checkpoints and schedules replace
                part.param_groups = [group for group in self.param_groups if group["muon"] is of_muon]
                part.state = self.state
                part.step()
        return loss


class StochasticAdamW(Optimizer):
    """AdamW for weights held in bfloat16, with stochastic rounding: a new weight is rounded up or down at random.

    bfloat16 has 8 significant bits, so an update below 1/512 of a weight, as a learning rate of 1e-6 makes, is always
    lost when the weight is rounded to the nearest number. Here moments and the new weight w are computed in float32; w
    between neighbours a < w < b becomes b with probability (w - a) / (b - a) and else a, with expectation w (Zamirai et
    al. 2020, "Revisiting bfloat16 training", arXiv 2010.06192). Weights in float32 are updated as by
    `torch.optim.AdamW`.

    Random numbers are from generators seeded with `seed`, the number of the step and the index of the weight: a resumed
    run draws the same numbers, and no other generator is changed.

    Args:
        params: weights or groups of them.
        lr, betas, eps, weight_decay: of AdamW.
        seed: of the rounding. Processes that hold the same weight draw the same numbers; different shards draw others.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ):
        self._seed = seed
        self._adamw = AdamW(_groups(params), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(self._adamw.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Move the weights that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        place = 0
        for group in self.param_groups:
            for weight in group["params"]:
                place += 1
                if weight.grad is None:
                    continue
                if weight.dtype != torch.bfloat16:
                    self._move(group, weight, self.state[weight])
                    continue
                wide, state = weight.detach().float(), self.state[weight]
                wide.grad = weight.grad.float()
                self._move(group, wide, state)
                seed, new = mixed(self._seed, int(state["step"]), place, *_shard(weight)), _local(wide)
                _local(weight).copy_(rounded(new, drawn_noise(new, seed)))
        return loss

    def _move(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        """Take one step of AdamW for a weight whose moments are in `state`."""
        self._adamw.param_groups = [{**group, "params": [weight]}]
        self._adamw.state = defaultdict(dict, {weight: state})
        self._adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with the moments in float32; torch would round them to the dtype of their weights."""
        super().load_state_dict(state_dict)
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for place, weight in zip(places, weights, strict=True):
            for name, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor) and name != "step" and weight.dtype == torch.bfloat16:
                    self.state[weight][name] = value.detach().to(weight.device, torch.float32, copy=True)


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """float32 `values` in bfloat16, rounded to one of the two neighbours; the mean over `noise` is the value itself.

    bfloat16 is the upper half of float32. Adding `noise`, an int32 from 0 to 2^16 - 1, to the bits carries into the
    upper half with probability (lower half) / 2^16, the distance to the neighbour nearer to 0, relative to the gap
    between the neighbours. Numbers that bfloat16 can represent do not change, nor do infinity and NaN.
    """
    carried = (values.contiguous().view(torch.int32) + noise) & -NOISES
    return torch.where(values.isfinite(), carried.view(torch.float32), values).to(torch.bfloat16)


def drawn_noise(values: Tensor, seed: int) -> Tensor:
    """Random int32 numbers from 0 to 2^16 - 1, in the shape of `values`, from a new generator with this seed."""
    generator = torch.Generator(values.device).manual_seed(seed)
    return torch.randint(0, NOISES, values.shape, generator=generator, dtype=torch.int32, device=values.device)


def mixed(*numbers: int) -> int:
    """A seed of 63 bits, mixed from several numbers so that numbers close to each other give unrelated seeds."""
    seed = 0
    for number in numbers:
        seed = ((seed ^ number) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & (2**64 - 1)
        seed ^= seed >> 29
    return seed >> 1


def _local(values: Tensor) -> Tensor:
    """This process's shard of a sharded tensor (FSDP2)."""
    return getattr(values, "_local_tensor", values).detach()


def _shard(weight: Tensor) -> list[int]:
    """Index of this process's shard of a weight in each dimension of the mesh; [] if the weight is whole."""
    if not isinstance(weight, DTensor):
        return []
    places = list(weight.device_mesh.get_coordinate() or ())
    return [place for place, how in zip(places, weight.placements, strict=True) if how.is_shard()]


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    return given if given and isinstance(given[0], dict) else [{"params": given}]
