"""Router loads of a mixture of experts, for the loss that balances them (arXiv 2101.03961, eq. 4-6).

They are kept as sums, which add up over micro-batches and processes, unlike transformers' means. See also
`covey.trainer.loss_terms`.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.core.findings import CheckError
from covey.core.model import without_adapter


class RouterLoads(NamedTuple):
    """Sums over tokens and layers; each token counts once per rollout that contains it."""

    chosen: Tensor  # [E], number of times that each expert was among the k of a token; no gradient
    probability: Tensor  # [E], sum of each expert's probability; with gradient
    pairs: Tensor  # number of (token, layer) pairs

    @classmethod
    def of_all(cls, parts: "Sequence[RouterLoads]") -> "RouterLoads":
        return cls(*(torch.stack(column).sum(0) for column in zip(*parts, strict=True)))


def loads_of(router_logits: Sequence[Tensor], readers: Tensor, top_k: int) -> RouterLoads:
    """Sum the router logits of all layers, [T, E] or [rows, width, E] each, into loads.

    `readers` [T] is the number of rollouts that contain each position, its weight in the sum; `top_k` is k.
    """
    experts = router_logits[0].shape[-1]
    layers = []
    for logits in router_logits:
        flat = logits.reshape(-1, experts).to(readers.device)
        odds = flat.to(torch.promote_types(flat.dtype, torch.float32)).softmax(-1)
        weight = readers.to(odds.dtype)
        winners = odds.detach().topk(top_k, dim=-1).indices.flatten()
        chosen = odds.new_zeros(experts).scatter_add(0, winners, weight.repeat_interleave(top_k))
        layers.append(RouterLoads(chosen, weight @ odds, readers.sum()))
    return RouterLoads.of_all(layers)


def load_balancing_loss(whole: RouterLoads, part: RouterLoads) -> Tensor:
    """Share of `part` (a micro-batch) in the loss E · Σₑ fₑ Pₑ of `whole` (an optimizer step of all processes).

    fₑ is the share of tokens that expert e was chosen for (no gradient) and Pₑ its mean probability, over all layers
    (arXiv 2101.03961, eq. 4-6). Example: with shares 0.75 and 0.25 and probabilities 0.7 and 0.3 the loss is
    2 · (0.75 · 0.7 + 0.25 · 0.3) = 1.2.
    """
    pairs = whole.pairs.clamp(min=1).to(part.probability)
    shares = whole.chosen.to(part.probability) / pairs
    return len(shares) * (shares @ part.probability) / pairs


def router_logits(model: Any, output: Any) -> list[Tensor]:
    """Router logits of each layer in a decoder's output.

    CheckError if there are none, or if they have no gradient, which reentrant checkpointing cuts off.
    """
    found = [logits for logits in getattr(output, "router_logits", None) or () if logits is not None]
    if not found:
        raise CheckError.of(
            "model-experts",
            f"router_aux_loss_coef: {type(model).__name__} returns no router logits, so the load of its experts cannot"
            " be balanced.",
            "Set router_aux_loss_coef=0.",
        )
    if torch.is_grad_enabled() and not any(logits.requires_grad for logits in found):
        raise CheckError.of(
            "model-experts",
            "router_aux_loss_coef: the routers give no gradient, which reentrant checkpointing cuts off.",
            "Set gradient_checkpointing_kwargs={'use_reentrant': False}, gradient_checkpointing=False or"
            " router_aux_loss_coef=0.",
        )
    return found


def has_balancing_loss(model: Any) -> bool:
    """True if transformers computes a load-balancing loss for models of this class."""
    modules = [sys.modules.get(kind.__module__) for kind in type(without_adapter(model)).__mro__]
    return experts_per_token(model) is not None and any(hasattr(m, "load_balancing_loss_func") for m in modules)


def experts_per_token(model: Any) -> int | None:
    """Experts per token in the config, as transformers' loss reads it; None if it is missing."""
    config = model.config.get_text_config()
    owners = (config, getattr(config, "ffn_config", None))
    named = [getattr(owner, name, None) for owner in owners for name in ("num_experts_per_tok", "moe_top_k")]
    return next((number for number in named if isinstance(number, int)), None)
