"""Batch algebra: the division of completions, prompts, micro-batches and updates.

Arithmetic in whole numbers; docs/batch-algebra.md explains it in prose.

    generation_batch_size   = per_device_train_batch_size * world_size * steps_per_generation    [completions]
    prompts_per_rollout_batch  = generation_batch_size / num_generations
    completions_per_update  = per_device_train_batch_size * world_size * gradient_accumulation_steps
    updates_per_rollout_batch  = steps_per_generation * num_iterations / gradient_accumulation_steps
    on-policy              <=> gradient_accumulation_steps is a multiple of steps_per_generation * num_iterations
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fractions import Fraction

from covey.core.findings import CheckError, Finding


@dataclass(frozen=True)
class PlannedMachine:
    """The machine that a config is planned for, which need not be this one."""

    world_size: int | None = None  # training processes; None: the running ones
    gpu: bool = False  # a GPU that multiplies bfloat16; False: the hardware of this machine


THIS_MACHINE = PlannedMachine()
PLANNED: ContextVar[PlannedMachine] = ContextVar("planned_machine", default=THIS_MACHINE)


@contextmanager
def planning_for(world_size: int | None, gpu: bool = False) -> Iterator[None]:
    """Resolve configs within this context for another machine: its number of processes, and a GPU of its own."""
    token = PLANNED.set(PlannedMachine(world_size, gpu))
    try:
        yield
    finally:
        PLANNED.reset(token)


@dataclass(frozen=True)
class BatchAlgebra:
    """Batch sizes of a run. They count completions, never prompts.

    Example:
        >>> a = BatchAlgebra(per_device_train_batch_size=4, gradient_accumulation_steps=8, steps_per_generation=16,
        ...                  num_iterations=1, num_generations=64, world_size=8)
        >>> a.generation_batch_size, a.prompts_per_rollout_batch, a.completions_per_update, a.on_policy
        (512, 8, 256, False)
    """

    per_device_train_batch_size: int  # completions of one micro-batch in one process
    gradient_accumulation_steps: int  # micro-batches of one optimizer update
    steps_per_generation: int  # micro-batches that one rollout batch is cut into
    num_iterations: int  # times that each rollout batch is trained on
    num_generations: int  # completions per prompt
    world_size: int = 1  # processes
    per_device_eval_batch_size: int = 8  # completions of one evaluation batch in one process
    num_generations_eval: int | None = None  # completions per prompt in evaluation; None: as in training
    rollouts_per_game: int = 1  # completions that are never cut between processes

    @property
    def micro_batch(self) -> int:
        """Completions of one micro-batch over all processes."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def generation_batch_size(self) -> int:
        """Completions sampled at a time over all processes."""
        return self.micro_batch * self.steps_per_generation

    @property
    def prompts_per_rollout_batch(self) -> int:
        """Distinct prompts sampled from at a time."""
        return self.generation_batch_size // self.num_generations

    @property
    def micro_batches(self) -> int:
        """Nominal micro-batches that each process trains on in one rollout batch."""
        return self.steps_per_generation * self.num_iterations

    @property
    def updates_per_rollout_batch(self) -> Fraction:
        """Optimizer updates until the next rollout batch; below 1 where one update spans several."""
        return Fraction(self.micro_batches, self.gradient_accumulation_steps)

    @property
    def completions_per_update(self) -> int:
        """Completions that one optimizer update averages over, all processes together."""
        return self.micro_batch * self.gradient_accumulation_steps

    @property
    def on_policy(self) -> bool:
        """True if every gradient is computed with the weights with which training on its rollout batch began.

        All importance ratios are 1 then. The same weights sampled the batch, except with async rollouts
        (`max_staleness`), where the mismatch correction accounts for the difference.
        """
        return self.gradient_accumulation_steps % self.micro_batches == 0

    @property
    def eval_group(self) -> int:
        """Completions per prompt in evaluation."""
        return self.num_generations if self.num_generations_eval is None else self.num_generations_eval

    def group_size(self, mode: str) -> int:
        """Completions per prompt, in "train" or "eval"."""
        return self.num_generations if mode == "train" else self.eval_group

    def rows(self, mode: str) -> int:
        """Completions of one nominal micro-batch in one process."""
        return self.per_device_train_batch_size if mode == "train" else self.per_device_eval_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Completions of one evaluation batch over all processes."""
        return self.per_device_eval_batch_size * self.world_size

    @property
    def prompts_per_eval_batch(self) -> int:
        """Distinct prompts of one evaluation batch."""
        return self.eval_batch_size // self.eval_group

    def check(self, generation_batch_size_given: bool = False) -> Iterator[Finding]:
        """The error of a rollout batch that does not consist of whole groups, with the nearest numbers that divide.

        Proposals change `steps_per_generation`, or `generation_batch_size` where the user has given that.
        """

        def fits(changed: BatchAlgebra) -> bool:
            return changed.num_generations >= 2 and changed.generation_batch_size % changed.num_generations == 0

        if self.generation_batch_size % self.num_generations == 0:
            yield from self._check_games()
            return
        total, whole = self.generation_batch_size, math.lcm(self.num_generations, self.micro_batch)
        accumulated = self.steps_per_generation == self.gradient_accumulation_steps
        steps = "gradient_accumulation_steps or steps_per_generation" if accumulated else "steps_per_generation"
        if generation_batch_size_given:
            proposals = [
                _proposal("generation_batch_size", total, lambda n: n % whole == 0),
                self._proposal("num_generations", fits),
            ]
        else:
            proposals = [
                self._proposal("num_generations", fits),
                self._proposal("per_device_train_batch_size", fits),
                self._proposal("steps_per_generation", fits, steps),
                self._proposal("world_size", fits, "the number of processes"),
            ]
        yield Finding.error(
            "batch-groups",
            f"A rollout batch of {total} completions (per_device_train_batch_size={self.per_device_train_batch_size}"
            f" * {self.world_size} process(es) * steps_per_generation={self.steps_per_generation}) cannot be cut into"
            f" groups of num_generations={self.num_generations}.",
            f"Change one of these to the nearest number that divides: {'; '.join(proposals)}.",
        )

    def check_eval(self) -> Iterator[Finding]:
        """The error of an evaluation batch that does not consist of whole groups, as `check` does."""

        def fits(changed: BatchAlgebra) -> bool:
            return changed.eval_batch_size % changed.eval_group == 0

        yield from self._check_group("num_generations_eval", self.eval_group)
        if not fits(self):
            resolved = replace(self, num_generations_eval=self.eval_group)
            proposals = [
                resolved._proposal("num_generations_eval", fits),
                resolved._proposal("per_device_eval_batch_size", fits),
                resolved._proposal("world_size", fits, "the number of processes"),
            ]
            yield Finding.error(
                "batch-groups",
                f"An evaluation batch of {self.eval_batch_size} completions (per_device_eval_batch_size="
                f"{self.per_device_eval_batch_size} * {self.world_size} process(es)) cannot be cut into groups of"
                f" num_generations_eval={self.eval_group}.",
                f"Change one of these to the nearest number that divides: {'; '.join(proposals)}.",
            )

    def _check_group(self, name: str, group: int) -> Iterator[Finding]:
        """The error of a group size, the setting `name`, that is no multiple of the rollouts of a game."""
        games = self.rollouts_per_game
        if group % games:
            yield Finding.error(
                "game-cut",
                f"{name}={group} is not a multiple of rollouts_per_game={games}, so a game would be cut.",
                f"Change {_proposal(name, group, lambda n: n % games == 0)}.",
            )

    def _check_games(self) -> Iterator[Finding]:
        """Errors of groups and of processes' shares that would cut a game."""
        games, own = self.rollouts_per_game, self.per_device_train_batch_size * self.steps_per_generation

        def whole(number: int) -> bool:
            return number % games == 0

        if not whole(self.num_generations):
            yield from self._check_group("num_generations", self.num_generations)
        elif not whole(own):
            total, single = self.generation_batch_size, self.per_device_train_batch_size
            counts = [n for n in range(1, self.world_size + 2) if total % n == 0 and whole(total // n)]
            yield Finding.error(
                "game-cut",
                f"{total} rollouts over {self.world_size} processes are {own} for each, which would cut a game of"
                f" {games} rollouts.",
                f"Use {' or '.join(map(str, counts)) or 'fewer'} processes, or change"
                f" {_proposal('per_device_train_batch_size', single, lambda n: whole(n * self.steps_per_generation))}.",
            )

    def _proposal(self, name: str, fits: "Callable[[BatchAlgebra], bool]", label: str = "") -> str:
        return _proposal(label or name, getattr(self, name), lambda n: fits(replace(self, **{name: n})))


def steps_of(generation_batch_size: int, per_device: int, world_size: int, num_generations: int) -> int:
    """Micro-batches in a rollout batch of `generation_batch_size` completions, which must be a whole number."""
    total, micro_batch = generation_batch_size, per_device * world_size
    if total % micro_batch == 0:
        return total // micro_batch
    proposals = [
        _proposal("generation_batch_size", total, lambda n: n % math.lcm(micro_batch, num_generations) == 0),
        _proposal("per_device_train_batch_size", per_device, lambda n: total % (n * world_size) == 0),
        _proposal("the number of processes", world_size, lambda n: total % (n * per_device) == 0),
    ]
    raise CheckError.of(
        "batch-micro-batches",
        f"generation_batch_size={total} is not a whole number of micro-batches of {micro_batch} completions "
        f"(per_device_train_batch_size={per_device} * {world_size} process(es)).",
        f"Change one of these to the nearest number that divides: {'; '.join(proposals)}.",
    )


def nearest(value: int, fits: Callable[[int], bool], furthest: int = 1_000_000) -> list[int]:
    """The nearest number below and the nearest above `value` that satisfy `fits`; fewer if there is none."""
    below = next((n for n in range(value - 1, 0, -1) if fits(n)), None)
    reach = min(furthest, max(4 * value, 4096))
    above = next((n for n in range(max(value + 1, 1), reach) if fits(n)), None)
    return [n for n in (below, above) if n is not None]


def _proposal(name: str, value: int, fits: Callable[[int], bool]) -> str:
    numbers = nearest(value, fits)
    return f"{name}: {' or '.join(map(str, numbers))}" if numbers else f"{name}: no number near {value} fits"
