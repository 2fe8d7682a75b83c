"""Seconds of an optimizer step, on paper: what it computes and sends over what machines can do.

Good for choosing a layout and seeing what bounds a run. Efficiencies are assumptions, which a first measured step
should replace. Not here: what is computed and sent (`covey.sizing.costs`).
"""

from dataclasses import dataclass

from covey.sizing.costs import ModelSize, StepCosts
from covey.sizing.memory import MemoryEstimate
from covey.sizing.parallelism import ShardCounts


@dataclass(frozen=True)
class Machine:
    """One GPU and its way to others; figures of data sheets.

    Attributes:
        flops: a second, dense products in bfloat16.
        memory: bytes of memory.
        memory_rate: bytes a second that it reads from it.
        link: bytes a second from GPUs of the same node.
        network: bytes a second from other nodes, each GPU's share of them.
        training: share of `flops` that passes reach.
        decoding: share of `memory_rate` that decoding reaches.
    """

    flops: float
    memory: float
    memory_rate: float
    link: float
    network: float
    training: float = 0.4
    decoding: float = 0.5


MACHINES = {
    "a100": Machine(312e12, 80e9, 2.0e12, 300e9, 25e9),
    "h100": Machine(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": Machine(989e12, 141e9, 4.8e12, 450e9, 50e9),
}
"""With NVLink within a node, and one network adapter of 200 or 400 Gbit/s for each GPU."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the phases of one optimizer step.

    Attributes:
        sampling: of a server, or of the trainer's own GPUs where it samples.
        training: passes of one process, scoring included.
        moving: gathering weights and adding up gradients, in those passes.
        refreshing: after the optimizer's step.
        sync: gathering weights and sending them to a server.
        overlaps: sampling goes on beside training.
    """

    sampling: float
    training: float
    moving: float
    refreshing: float
    sync: float
    overlaps: bool

    @property
    def step(self) -> float:
        """All of it: what is moved in passes is moved beside them; what is longer counts."""
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
    """Seconds of one optimizer step.

    Decoding reads all weights and the keys and values of what runs for every token of the longest completion: R rows at
    once fit beside the weights, a generation of B takes ceil(B / R) rounds, and a round's token takes
    max((weights + R * tokens so far * cache_bytes) / memory_rate, R * 2 * weights / flops).

    Args:
        costs: of the step.
        memory: of a process.
        size: of the model.
        machine: a GPU.
        spread: over processes.
        cache_bytes: keys and values of a token.
        prompt_tokens: length of a prompt.
        gpus_of_node: in one machine; beyond it weights and gradients cross the network.
        sampling_gpus: of the server that samples; None: the training processes sample, each its share.
        overlaps: sampling goes on beside training.
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
    computed = (costs.training_flops + costs.scoring_flops) / n / (machine.flops * machine.training)
    return StepTimes(
        sampling=rounds * memory.completion_tokens * token,
        training=computed,
        moving=(costs.gathered + costs.reduced) / rate,
        refreshing=costs.refreshed / rate,
        sync=costs.sync_gathered / rate + costs.sync_sent / machine.network,
        overlaps=overlaps,
    )
