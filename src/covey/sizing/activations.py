"""Layers that keep their activations where `gradient_checkpointing=True` permits them to recompute."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ActivationRoom:
    """Memory for the activations of a pass, and what its layers take of it.

    The last layers are those that keep: the backward pass begins with them and frees theirs before it recomputes any.
    """

    size: int  # bytes for the activations of a pass
    recomputed: int  # bytes per token where every layer recomputes
    layer: int  # bytes per token of each layer that does not, in addition
    layers: int

    def kept(self, tokens: int) -> int:
        """Layers that keep in a pass of so many tokens; the last one for nothing, as it is recomputed at once.

        Example:
            100 bytes for 2 tokens, 20 each in any case and 10 for a layer: 1 + (100 - 40) // 20 = 4 layers.
        """
        left = self.size - tokens * self.recomputed
        return 0 if left < 0 else min(self.layers, 1 + left // max(tokens * self.layer, 1))


def may_keep(args: Any) -> bool:
    """True if layers recompute for want of memory alone; with `gradient_checkpointing_kwargs` every layer does."""
    # Padded rows may be under an attention that keeps its weights, and compiled layers would be compiled again.
    given = args.gradient_checkpointing_kwargs or getattr(args, "activation_checkpointing_kwargs", None)
    return bool(args.gradient_checkpointing and not given and not args.torch_compile and args.attn_layout != "padded")
