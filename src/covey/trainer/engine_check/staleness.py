"""Test, throughout a run, of the version of the weights that an engine samples with.

A few fresh rollouts are scored twice: with the current weights, and with those of an earlier rollout batch, which are
put back for a moment. Each token votes for the version that is closer to the engine's log-prob. Rounding, in whatever
number format, makes votes that cancel; an engine that missed an update gets votes of one sign.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from covey.core.batch import TrainBatch
from covey.policy.sharded_tensors import own_shard, reshard

# Versions after a copy of the weights at which it is compared with the current ones; then the next copy is taken.
LOOKS = (1, 2, 3, 8, 24)
COPIED_BYTES = 2**28  # most that a process copies; a part of the weights tells the versions apart less sharply
DEVIATIONS = 6.0
"""Votes' sum over the root of their sum of squares at which an engine counts as stale.

Where each vote is as likely to have either sign, the chance to reach it is at most exp(-6²/2) = 1.5e-8 (Efron 1969,
"Student's t-test under symmetry conditions").
"""

AGREEMENT = 0.5  # of the votes, by their size: 0 where they cancel, 1 where all are for the earlier version


class Snapshot:
    """Copies on the CPU of a model's trained weights (this process's shards), smallest first, up to `limit` bytes."""

    def __init__(self, model: nn.Module, limit: int = COPIED_BYTES):
        self._model = model
        self._pairs: list[tuple[Tensor, Tensor]] = []
        trained = (own_shard(weight).detach() for weight in model.parameters() if weight.requires_grad)
        for weight in sorted(trained, key=lambda weight: weight.nbytes):
            limit -= weight.nbytes
            if limit < 0:
                break
            self._pairs.append((weight, weight.to("cpu", copy=True)))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the copies in the place of the weights within the context; afterwards these are as before, to the bit."""
        current = [weight.clone() for weight, _ in self._pairs]
        try:
            self._write(copy for _, copy in self._pairs)
            yield
        finally:
            self._write(current)

    def _write(self, values: Iterable[Tensor]) -> None:
        for (weight, _), value in zip(self._pairs, values, strict=True):
            weight.copy_(value)
        reshard(self._model)  # what it gathered is of the weights before


class VersionTest:
    """Evidence, gathered over a run, that earlier weights explain an engine's log-probs better than current ones."""

    def __init__(self, policy: Callable[[], nn.Module], version: Callable[[], int]):
        self._policy, self._version = policy, version  # the version is the number of optimizer steps
        self._snapshot: Snapshot | None = None
        self._seen = self._copied = -1  # versions: the newest, and the copied one
        self._age = self._looked = 0  # versions since the copy, and looks that were taken at it
        self._sums = torch.zeros(6, dtype=torch.float64)

    def due(self) -> bool:
        """True if rollouts of the current weights are to be compared now; the same in every process."""
        version = self._version()
        if self._snapshot is None:
            self._copy()
        elif version != self._seen:
            self._seen, self._age = version, self._age + 1
        return version != self._copied and self._age >= LOOKS[self._looked]

    @torch.no_grad()
    def votes(self, few: TrainBatch, rescore: Callable[[TrainBatch], Tensor]) -> list[float] | None:
        """This process's sums over tokens: votes, their squares and sizes, differences now and then, and a count."""
        assert self._snapshot is not None, "asked when due"
        current = rescore(few)
        with self._snapshot.in_place():
            earlier = rescore(few)
        if few.engine_logprobs is None:
            return None
        now, then = ((few.engine_logprobs - scored)[few.sampled].double().abs() for scored in (current, earlier))
        vote = ((now - then) / (now + then)).nan_to_num(0.0)
        known = (now + then).isfinite()
        columns = (vote, vote**2, vote.abs(), now, then, torch.ones_like(now))
        return [column[known].sum().item() for column in columns]

    def finding(self, votes: list[list[float]]) -> str | None:
        """The error text if the evidence with these votes, of all processes, suffices."""
        if not votes:
            return None
        self._sums += torch.tensor(votes, dtype=torch.float64).sum(0)
        total, squares, sizes, now, then, tokens = self._sums.tolist()
        since, self._looked = self._copied, sum(look <= self._age for look in LOOKS)
        if self._looked == len(LOOKS):
            self._copy()
        if total <= 0:  # nothing speaks against the engine: what was is no credit for later
            self._sums.zero_()
            return None
        if total < DEVIATIONS * squares**0.5 or total < AGREEMENT * sizes:
            return None
        return (
            f"the engine has stale weights: {int(tokens)} of its log-probs are explained better by weights of step"
            f" {since} or about (mean difference {then / tokens:.2g} nats) than by those of step {self._seen}, which it"
            f" should sample with ({now / tokens:.2g}). It did not take an update, or not all of it: look at its"
            " `load_weights`, and at the log of its server."
        )

    def _copy(self) -> None:
        self._snapshot, self._seen = Snapshot(self._policy()), self._version()
        self._copied, self._age, self._looked = self._seen, 0, 0
