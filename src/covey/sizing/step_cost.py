"""Operations, traffic and time of an optimizer step, by formulas from a model's config and the training arguments.

A multiplication and an addition are two floating-point operations. Bytes are those that one process receives. All
completions are counted at full length, and all groups as trained. Seconds are for choosing a layout and finding the
bottleneck: the efficiencies are assumptions, which a first measured step should replace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.config.teacher_sources import is_server
from covey.sizing.memory import MemoryEstimate, ShardCounts
from covey.sizing.model_spec import DecoderWidths, unit_parameters


@dataclass(frozen=True)
class ModelSize:
    body: int  # weights of the matrices in the layers; of a mixture of experts, only of the experts that a token uses
    head: int  # weights of the output head (vocabulary x hidden size), tied or not
    layers: int  # decoder layers
    width: int  # query heads x head size

    @classmethod
    def of(cls, text: Any) -> "ModelSize":
        hidden, layers, widths = text.hidden_size, text.num_hidden_layers, DecoderWidths.of(text)
        body = layers * hidden * (2 * widths.queries + 2 * widths.keys + 3 * widths.inner)
        return cls(body, hidden * text.vocab_size, layers, widths.queries)


def positions(prompt: int, lengths: Sequence[int]) -> int:
    """Token positions of a group: the prompt, and each completion without its last token."""
    return prompt + sum(length - 1 for length in lengths)


def forward_flops(size: ModelSize, prompt: int, lengths: Sequence[int]) -> int:
    """Operations of one forward pass over a group that shares its prompt: P tokens, and completions of L_i.

    With causal attention pairs A = P (P + 1) / 2 + sum_i sum_{t < L_i - 1} (P + t + 1), each pair being a product of
    q and k and one of a weight and v:

        2 * body * (P + sum_i (L_i - 1)) + 2 * head * (1 + sum_i (L_i - 1)) + 4 * layers * width * A
    """
    pairs = prompt * (prompt + 1) // 2 + sum((length - 1) * (2 * prompt + length) // 2 for length in lengths)
    body, heads = positions(prompt, lengths), positions(1, lengths)  # in the prompt only the last position has logits
    return 2 * size.body * body + 2 * size.head * heads + 4 * size.layers * size.width * pairs


@dataclass(frozen=True)
class StepCosts:
    """Costs of all phases of one optimizer step: operations of all processes, and bytes that one process receives."""

    sampled_tokens: int  # of completions
    sampling_flops: int
    scoring_flops: int  # forward passes only: log-probs under the old policy, the reference and local teachers
    training_flops: int  # forward and backward passes, recomputation included
    gathered: int  # weights, in the forward and backward passes of a process
    reduced: int  # gradients
    refreshed: int  # weights, after the optimizer's step
    sync_gathered: int  # weights, so that the first process can send them to servers
    sync_sent: int  # by the first process to a server


def step_costs(
    config: Any, args: Any, memory: MemoryEstimate, spread: ShardCounts, *, prompt_tokens: int, adapter: bool = False
) -> StepCosts:
    """Costs of one optimizer step.

    A training pass takes three times the products of a forward pass (forward, gradients of inputs, gradients of
    weights), or twice with frozen weights under an adapter; layers that recompute take one more forward pass.
    """
    text, algebra = config.get_text_config(), args.algebra(spread.processes)
    size, length = ModelSize.of(text), memory.completion_tokens
    group = [length] * algebra.num_generations
    groups = algebra.completions_per_update / algebra.num_generations
    forward = int(groups * forward_flops(size, prompt_tokens, group))
    in_layers = forward - int(groups * 2 * size.head * positions(1, group))
    recomputed = in_layers * (memory.layers - memory.kept_layers) // memory.layers
    taught = any(not is_server(source) for source in args.teachers.values())
    scorings = bool(args.beta) + taught + (not algebra.on_policy or args.penalises_reward)
    received = received_by(spread, memory, unit_parameters(config))
    passes, fresh = memory.micro_batches, 1 / algebra.num_iterations
    whole_weights = memory.trainable * memory.stored_bytes if spread.optimizer > 1 and spread.weights == 1 else 0
    return StepCosts(
        sampled_tokens=int(algebra.completions_per_update * length * fresh),
        sampling_flops=int(forward * fresh),
        scoring_flops=int(scorings * forward * fresh),
        training_flops=(2 if adapter else 3) * forward + recomputed,
        gathered=received.gathered(passes, int(passes * scorings * fresh)),
        reduced=received.reduced(passes),
        refreshed=received.of_others(whole_weights),
        sync_gathered=received.of_others(received.whole) if args.samples_elsewhere and spread.weights > 1 else 0,
        sync_sent=memory.parameters * memory.computed_bytes if args.samples_elsewhere else 0,
    )


@dataclass(frozen=True)
class Received:
    """Bytes that a process receives in the phases of a step.

    Sharded weights are received once per forward and once per backward pass, except those that stay in memory.
    Gradients are received as a shard from each other process in every micro-batch, or as all sums twice per step
    (all-reduce).
    """

    spread: ShardCounts
    whole: int  # bytes of all weights, in the dtype of matrix products
    stays: int  # bytes of weights that are gathered once for forward and backward
    gradients: int  # bytes of all gradients, in the dtype in which they are sent

    def of_others(self, size: int) -> int:
        """The part of `size` bytes that other processes have."""
        return size * (self.spread.processes - 1) // self.spread.processes

    def gathered(self, passes: int, forwards: int = 0) -> int:
        """Bytes of weights received in `trained` forward and backward passes, and in forward passes only."""
        each = self.of_others(self.whole)
        return (self.spread.weights > 1) * (passes * (2 * each - self.of_others(self.stays)) + forwards * each)

    def reduced(self, passes: int) -> int:
        return (passes if self.spread.gradients > 1 else 2) * self.of_others(self.gradients)


def received_by(spread: ShardCounts, memory: MemoryEstimate, units: tuple[int, int]) -> Received:
    """Bytes that a process receives, for a model with this memory and these `unit_parameters`."""
    stays = 0 if spread.name == "zero3" else units[0]  # DeepSpeed releases them if passes differ, as they do here
    number = memory.computed_bytes
    gradients = memory.trainable * (number if spread.gradients > 1 else memory.stored_bytes)
    return Received(spread, whole=memory.parameters * number, stays=stays * number, gradients=gradients)


@dataclass(frozen=True)
class Machine:
    """A GPU and its connections, from data sheets; rates are in bytes per second."""

    flops: float  # operations per second of dense products in bfloat16
    memory: float  # bytes
    memory_rate: float
    link: float  # from GPUs of the same node
    network: float  # from other nodes, per GPU
    training: float = 0.4  # share of `flops` that passes reach
    decoding: float = 0.5  # share of `memory_rate` that decoding reaches


MACHINES = {
    "a100": Machine(312e12, 80e9, 2.0e12, 300e9, 25e9),
    "h100": Machine(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": Machine(989e12, 141e9, 4.8e12, 450e9, 50e9),
}
"""Machines with NVLink within a node, and one network adapter of 200 or 400 Gbit/s per GPU."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the phases of one optimizer step."""

    sampling: float  # on a server, or on the trainer's own GPUs
    training: float  # forward and backward passes of one process, including scoring
    moving: float  # gathering weights and adding up gradients in those passes
    refreshing: float  # sending weights after the optimizer's step
    sync: float  # gathering weights and sending them to a server
    overlaps: bool  # sampling runs while the policy trains

    @property
    def step(self) -> float:
        """Seconds of the whole step; traffic overlaps with passes, so the longer of the two counts."""
        update = max(self.training, self.moving) + self.refreshing
        return self.sync + (max(self.sampling, update) if self.overlaps else self.sampling + update)


def step_times(
    costs: StepCosts,
    memory: MemoryEstimate,
    size: ModelSize,
    machine: Machine,
    spread: ShardCounts,
    *,
    cache_bytes: int,
    prompt_tokens: int,
    gpus_of_node: int = 8,
    sampling_gpus: int | None = None,
    overlaps: bool = False,
) -> StepTimes:
    """Seconds of the phases of one optimizer step; `cache_bytes` are the bytes of a token's keys and values.

    Decoding reads all weights, keys and values for every token of the longest completion. If the cache holds R
    sequences, B completions take B / R rounds, at least 1, and a token of a round takes
    max((weights + R * tokens so far * cache_bytes) / memory_rate, R * 2 * weights / flops).
    Without a server's `sampling_gpus` each training process samples its part.
    """
    n = spread.processes
    rate = machine.network if n > gpus_of_node else machine.link
    gpus = sampling_gpus or 1  # the trainer's own engine holds the model on each GPU
    rows_in_all = costs.sampled_tokens / max(memory.completion_tokens, 1) / (1 if sampling_gpus else n)
    weights = memory.parameters * memory.computed_bytes
    mean = (prompt_tokens + memory.completion_tokens / 2) * cache_bytes
    free = gpus * machine.memory * 0.9 - weights if sampling_gpus else machine.memory - memory.resident - memory.copy
    most = max(1.0, free / ((prompt_tokens + memory.completion_tokens) * cache_bytes))
    rounds = max(1.0, rows_in_all / most)
    rows = rows_in_all / rounds
    token = max(
        (weights + rows * mean) / (gpus * machine.memory_rate * machine.decoding),
        rows * 2 * (size.body + size.head) / (gpus * machine.flops * machine.training),
    )
    return StepTimes(
        sampling=rounds * memory.completion_tokens * token,
        training=(costs.training_flops + costs.scoring_flops) / n / (machine.flops * machine.training),
        moving=(costs.gathered + costs.reduced) / rate,
        refreshing=costs.refreshed / rate,
        sync=costs.sync_gathered / rate + costs.sync_sent / machine.network,
        overlaps=overlaps,
    )
