"""What an optimizer step computes and sends, by phase: formulas, from a model's config and the training arguments.

Operations are of floating-point numbers, a multiplication and an addition being two. Bytes are those that one process
receives. Counted are full completions and groups that all carry a signal. Bytes in memory are in
`covey.sizing.memory`; seconds, from these and the speed of a machine, in `covey.sizing.step_time`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.sizing.memory import MemoryEstimate
from covey.sizing.model_spec import unit_parameters
from covey.sizing.parallelism import ShardCounts


@dataclass(frozen=True)
class ModelSize:
    """What of a decoder model multiplies.

    Attributes:
        body: weights of the matrices in the layers; of a mixture, those of the experts that a token goes through.
        head: weights of the output head (vocabulary x hidden size), whether tied or not.
        layers: decoder layers.
        width: heads x head size, of the queries.
    """

    body: int
    head: int
    layers: int
    width: int

    @classmethod
    def of(cls, text: Any) -> "ModelSize":
        """Of a Llama-like text config of transformers."""
        hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
        head_size = getattr(text, "head_dim", None) or hidden // heads
        keys = getattr(text, "num_key_value_heads", None) or heads
        experts = getattr(text, "num_experts_per_tok", None) or 1
        inner = getattr(text, "moe_intermediate_size", None) if experts > 1 else None
        inner = experts * (inner or getattr(text, "intermediate_size", None) or 4 * hidden)
        attention = hidden * head_size * (2 * heads + 2 * keys)
        return cls(layers * (attention + 3 * hidden * inner), hidden * text.vocab_size, layers, heads * head_size)


def positions(prompt: int, lengths: Sequence[int]) -> int:
    """Token positions that a group needs computed once: the prompt, and each completion but its last token."""
    return prompt + sum(length - 1 for length in lengths)


def forward_flops(size: ModelSize, prompt: int, lengths: Sequence[int]) -> int:
    """Least operations of one forward pass over a group: a prompt of P tokens and completions of L_i, prompt shared.

    With causal attention pairs A = P (P + 1) / 2 + sum_i sum_{t < L_i - 1} (P + t + 1), each pair being a product of
    q and k and one of a weight and v:

        2 * body * (P + sum_i (L_i - 1)) + 2 * head * (1 + sum_i (L_i - 1)) + 4 * layers * width * A
    """
    pairs = prompt * (prompt + 1) // 2
    for length in lengths:
        fed = length - 1
        pairs += fed * prompt + fed * (fed + 1) // 2
    heads = 1 + sum(length - 1 for length in lengths)
    return 2 * size.body * positions(prompt, lengths) + 2 * size.head * heads + 4 * size.layers * size.width * pairs


@dataclass(frozen=True)
class StepCosts:
    """One optimizer step, all phases.

    Attributes:
        sampled_tokens: completion tokens that are sampled for it.
        sampling_flops: operations of sampling them.
        scoring_flops: operations of forward passes alone: old log-probs, and the reference's.
        training_flops: operations of forward and backward passes, recomputation included; of all processes.
        passes: forward and backward passes of a process.
        gathered: bytes of weights that a process receives in its passes; 0 where it has them.
        reduced: bytes of gradients that a process receives.
        refreshed: bytes of weights that a process receives after the optimizer's step, of those it did not update.
        sync_gathered: bytes of weights that a process receives so that the first one can send them to servers.
        sync_sent: bytes that the first process sends to a server.
    """

    sampled_tokens: int
    sampling_flops: int
    scoring_flops: int
    training_flops: int
    passes: int
    gathered: int
    reduced: int
    refreshed: int
    sync_gathered: int
    sync_sent: int


def step_costs(
    config: Any, args: Any, memory: MemoryEstimate, spread: ShardCounts, *, prompt_tokens: int, adapter: bool = False
) -> StepCosts:
    """Costs of one optimizer step.

    A training pass multiplies three times what a forward pass does (forward, gradients of inputs, of weights), or twice
    with frozen weights under an adapter; with checkpointed layers the layers' forward once more. Sharded weights are
    received once for the forward pass and once more for the backward, but for those that stay; gradients are
    received once in each pass, by reduce-scatter. Otherwise they are added up once a step.

    Args:
        config: a transformers model config.
        args: a `GRPOConfig` or `RLOOConfig`.
        memory: its estimate, with the same spread.
        spread: over processes.
        prompt_tokens: length of a prompt.
        adapter: an adapter is trained, not the model.
    """
    text, algebra = config.get_text_config(), args.algebra(spread.processes)
    size, length = ModelSize.of(text), memory.completion_tokens
    group = [length] * algebra.num_generations
    groups = algebra.completions_per_update / algebra.num_generations
    forward = int(groups * forward_flops(size, prompt_tokens, group))
    again = forward - int(groups * 2 * size.head * (1 + sum(one - 1 for one in group)))
    scorings = bool(args.beta) + (not algebra.on_policy or (args.method == "rloo" and bool(args.beta)))
    received = received_by(spread, memory, unit_parameters(config))
    fresh = 1 / algebra.num_iterations
    return StepCosts(
        sampled_tokens=int(algebra.completions_per_update * length * fresh),
        sampling_flops=int(forward * fresh),
        scoring_flops=int(scorings * forward * fresh),
        training_flops=(2 if adapter else 3) * forward + again * bool(args.gradient_checkpointing),
        passes=memory.passes,
        gathered=received.gathered(memory.passes, int(memory.passes * scorings * fresh)),
        reduced=received.reduced(memory.passes),
        refreshed=received.refreshed(),
        sync_gathered=received.gathered_for_sync() if args.samples_elsewhere else 0,
        sync_sent=memory.parameters * memory.computed_bytes if args.samples_elsewhere else 0,
    )


@dataclass(frozen=True)
class Received:
    """Bytes that a process receives, by occasion.

    Attributes:
        spread: over processes.
        whole: bytes of all weights as they are multiplied.
        stays: bytes of those that a pass gathers once: they are still there when it comes back to them.
        gradients: bytes of all gradients as they travel.
        updated: bytes of the trained weights as they are stored.
    """

    spread: ShardCounts
    whole: int
    stays: int
    gradients: int
    updated: int

    def _of_others(self, size: int) -> int:
        n = self.spread.processes
        return size * (n - 1) // n

    def gathered(self, passes: int, forwards: int = 0) -> int:
        """In forward and backward passes, and in forward passes alone."""
        if self.spread.weights == 1:
            return 0
        each = self._of_others(self.whole)
        return passes * (2 * each - self._of_others(self.stays)) + forwards * each

    def reduced(self, passes: int) -> int:
        """In every pass one share from each other process, or once a step all sums twice (ring all-reduce)."""
        if self.spread.processes == 1:
            return 0
        if self.spread.gradients > 1:
            return passes * self._of_others(self.gradients)
        return 2 * self._of_others(self.gradients)

    def refreshed(self) -> int:
        """After a step of an optimizer that is shared out over whole weights (ZeRO-1 and 2)."""
        if self.spread.optimizer == 1 or self.spread.weights > 1:
            return 0
        return self._of_others(self.updated)

    def gathered_for_sync(self) -> int:
        """Every process takes part where weights are shared out; they travel as servers take them."""
        return self._of_others(self.whole) if self.spread.weights > 1 else 0


def received_by(spread: ShardCounts, memory: MemoryEstimate, units: Any) -> Received:
    """What a process receives of a model whose memory and `unit_parameters` are known."""
    stored, computed = memory.stored_bytes, memory.computed_bytes
    stays = 0 if spread.name == "zero3" else units.outer  # DeepSpeed lets go where passes differ, as they do here
    return Received(
        spread,
        whole=memory.parameters * computed,
        stays=stays * computed,
        gradients=memory.trainable * (computed if spread.gradients > 1 else stored),
        updated=memory.trainable * stored,
    )
