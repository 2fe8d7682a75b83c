"""How weights, gradients and optimizer state are shared out over processes, as figures: for estimates.

What a running trainer must know of its sharding is in `covey.trainer.distributed.sharding`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardCounts:
    """Over how many processes each part lies.

    Attributes:
        name: of the way; a key of `WAYS`.
        processes: that train.
        weights: processes that a weight is shared out over; 1 where each has all of it.
        gradients: the same for gradients.
        optimizer: the same for the optimizer's state.
    """

    name: str = "multi_gpu"
    processes: int = 1
    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    @classmethod
    def of(cls, name: str, processes: int) -> "ShardCounts":
        """A way of sharing out by the name of the accelerate config that comes with Covey.

        Example:
            >>> Spread.of("zero1", 8)
            Spread(name='zero1', processes=8, weights=1, gradients=1, optimizer=8)

        Raises:
            ValueError: there is no such way.
        """
        if name not in WAYS:
            raise ValueError(f"sharding {name!r} is not known; it is one of {', '.join(WAYS)}.")
        return cls(name, processes, *(processes if shared else 1 for shared in WAYS[name]))


@dataclass(frozen=True)
class Cluster:
    """Processes and the machines that they run on.

    Attributes:
        spread: of a model over the processes.
        machine: a key of `covey.sizing.step_time.MACHINES`, where a step's time is asked for.
        gpus_of_node: GPUs of one machine.
    """

    spread: ShardCounts
    machine: str | None = None
    gpus_of_node: int = 8

    @property
    def device(self) -> str | None:
        """What the run is for; None: what this machine has."""
        return "cuda" if self.machine else None


WAYS = {
    "multi_gpu": (False, False, False),
    "cpu_2proc": (False, False, False),
    "fsdp2": (True, True, True),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
}
"""Whether weights, gradients and optimizer state are shared out."""
