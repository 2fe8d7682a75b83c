"""Seats that are copies of the policy: as it is when the trainer is made, and as it was some optimizer steps ago."""

import asyncio
import copy
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from covey.core.engine import RolloutEngine, SampleRequest
from covey.core.findings import CheckError
from covey.core.records import Completion
from covey.rollout.prompts import sample_seed
from covey.rollout.seats import FROZEN, past_steps
from covey.rollout.vision import Vision
from covey.runtime.loop_thread import LoopThread
from covey.trainer.run import Run

MakeEngine = Callable[[Run, Any, Any, Callable[[], Any], int | None, Vision | None], RolloutEngine]


class FrozenEngine:
    """An engine of a policy that is not trained, on a thread of its own."""

    def __init__(self, engine: RolloutEngine):
        self._engine, self._thread = engine, LoopThread("covey-frozen", no_grad=True)
        self._awake, self._requests = ExitStack(), 0

    async def generate(self, request: SampleRequest) -> list[Completion]:
        return await asyncio.wrap_future(self._thread.start(self._generate(request)))

    async def _generate(self, request: SampleRequest) -> list[Completion]:
        if not self._requests:
            self._awake.enter_context(self._engine.awake())
        self._requests += 1
        try:
            return await self._engine.generate(request)
        finally:
            self._requests -= 1
            if not self._requests:
                self._awake.close()

    def close(self) -> None:
        self._thread.close()


def frozen_copy(model: Any) -> Any:
    """A copy of a model that shares the weights that are not trained, such as those under an adapter."""
    shared = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False).eval()


@dataclass(eq=False)
class PastPolicies:
    """Copies of the policy from earlier optimizer steps, one of which is drawn for each game.

    A copy is taken every `every` optimizer steps, where a rollout batch begins. The opponents of a game are the last
    `kept` copies that are at least `every` steps old; before there is one, the first copy.
    """

    every: int
    kept: int
    policy: Callable[[], Any]
    make: Callable[[Any], FrozenEngine]  # an engine of a copy
    step: int = field(default=0, init=False)  # optimizer steps that the policy has taken
    copies: dict[int, tuple[Any, FrozenEngine]] = field(default_factory=dict, init=False)  # by the step of each

    def keep(self, step: int, copies: bool = True) -> None:
        """Take a copy if it is time for one, and drop those that no game is played against any more.

        Without `copies`, as in an evaluation, only the policy's step is recorded.
        """
        self.step = step
        if not copies:
            return
        if not self.copies or step - max(self.copies) >= self.every:
            self._add(step, frozen_copy(self.policy()))
        for old in self._old_enough()[: -self.kept]:
            self.copies.pop(old)[1].close()

    def chosen(self, key: tuple[int | str, ...]) -> tuple[FrozenEngine, int]:
        """The opponent for a game, drawn by its key alone, and its age in optimizer steps; ValueError before any
        copy."""
        steps = self._old_enough() or sorted(self.copies)[:1]
        if not steps:
            raise ValueError(
                'a seat "policy:n" exists only once training has begun: give evaluations before it `eval_seats`.'
            )
        step = steps[sample_seed(*key, "opponent") % len(steps)]
        return self.copies[step][1], self.step - step

    def _old_enough(self) -> list[int]:
        return sorted(step for step in self.copies if self.step - step >= self.every)

    def _add(self, step: int, model: Any) -> None:
        self.copies[step] = model, self.make(model)

    def state_dict(self) -> dict[str, Any]:
        """The trained weights of every copy."""
        names = [name for name, weight in self.policy().named_parameters() if weight.requires_grad]
        weights = {step: dict(model.named_parameters()) for step, (model, _) in self.copies.items()}
        return {"copies": {step: {name: own[name].detach() for name in names} for step, own in weights.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for _, engine in self.copies.values():
            engine.close()
        self.copies = {}
        for step, weights in state["copies"].items():
            model = frozen_copy(self.policy())
            own = dict(model.named_parameters())
            with torch.no_grad():
                for name, weight in weights.items():
                    own[name].copy_(weight)
            self._add(step, model)


def build_seats(
    seats: Sequence[MutableMapping[str, Any]],
    run: Run,
    model: Any,
    tokenizer: Any,
    context: int | None,
    vision: Vision | None,
    build_engine: MakeEngine,
) -> list[PastPolicies]:
    """Replace "frozen" and "policy:n" among seats, in place, by engines; returns the earlier policies.

    CheckError where the weights are sharded, or where rollouts are sampled while the policy is trained.
    """
    args = copy.copy(run.args)
    args.use_vllm, args.use_sglang, args.replay_from, args.speculative_reuse = False, False, None, None
    args.engine_dtype = None  # they wake for single games, and none of their samples is trained on
    samples = replace(run, args=args) if isinstance(run, Run) else run

    def make(copied: Any) -> FrozenEngine:
        return FrozenEngine(build_engine(samples, copied, tokenizer, lambda: copied, context, vision))

    frozen: FrozenEngine | None = None
    past: dict[int, PastPolicies] = {}
    for each in seats:
        for name, seat in each.items():
            is_past = isinstance(seat, PastPolicies)  # of an earlier trainer of the same agent, as frozen ones
            every = seat.every if is_past else past_steps(seat)
            if every is None and not (seat == FROZEN or isinstance(seat, FrozenEngine)):
                continue
            if run.sharding.weights:
                evidence = f"the seat {name!r} needs a copy of the model, and its weights are sharded:"
                raise CheckError.of("seat-sharded", evidence, "give Seat(url=...).")
            if every is None:
                frozen = frozen or make(copy.deepcopy(model).requires_grad_(False))
                each[name] = frozen
                continue
            if run.args.max_staleness:
                raise CheckError.of(
                    "seat-async",
                    f"the seat {name!r} is an earlier policy, which depends on the step that is trained, and"
                    f" max_staleness={run.args.max_staleness} samples ahead of it:",
                    'set max_staleness=0, or take "frozen" or Seat(url=...).',
                )
            if every not in past:
                past[every] = PastPolicies(every, run.args.opponents_kept, partial(getattr, run, "policy"), make)
            each[name] = past[every]
    return [*past.values()]
