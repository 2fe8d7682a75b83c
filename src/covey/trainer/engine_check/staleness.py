"""Sign test, throughout a run, of the version of the weights that an engine samples with.

The check at the start of a run misses an engine that quietly keeps its weights: one update of a usual learning rate
moves log-probs by less than rounding explains. So a few fresh rollouts are scored twice, with the current weights and
with an earlier snapshot of them. Each token has a preference, from -1 to 1, for the version whose log-prob is closer to
the engine's: by rounding preferences cancel, and after a missed update they have one sign.

Two snapshots are compared: an old one, because small differences accumulate over updates, and the previous one, as soon
as the gap between engine and trainer exceeds everything seen before.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from covey.core.batch import TrainBatch
from covey.policy.sharded_tensors import own_shard, reshard

# Ages of a copy of the weights, in versions, at which it is compared with the current ones; then another is taken.
COMPARED_AT = (1, 2, 3, 8, 24)
COPIED_BYTES = 2**28  # most that a process copies; with a part of the weights alone the test is less sensitive
DEVIATIONS = 6.0
"""Sum of preferences over the root of their sum of squares at which an engine counts as stale.

Where each preference is as likely to have either sign, the chance to reach it is at most exp(-6²/2) = 1.5e-8 (Efron
1969, "Student's t-test under symmetry conditions").
"""

AGREEMENT = 0.5  # least sum of preferences over that of their sizes: 0 if they cancel, 1 if all are for the earlier
JUMP = 2.0  # times the largest difference so far, above which the last version is tested


class Snapshot:
    """Copies on the CPU of a model's trained weights (this process's shards), smallest first, up to `limit` bytes."""

    def __init__(self, model: nn.Module, limit: int = COPIED_BYTES):
        self._model = model
        self._pairs: list[tuple[Tensor, Tensor]] = []
        reshard(model)  # a gathered weight of FSDP2 is freed later, and writing to it changes no shard
        trained = (own_shard(weight).detach() for weight in model.parameters() if weight.requires_grad)
        for weight in sorted(trained, key=lambda weight: weight.nbytes):
            limit -= weight.nbytes
            if limit < 0:
                break
            self._pairs.append((weight, weight.to("cpu", copy=True)))

    def renew(self) -> None:
        for weight, copy in self._pairs:
            copy.copy_(weight)

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


@dataclass
class Evidence:
    """Running evidence that the engine still uses the weights of `version` instead of the current ones."""

    snapshot: Snapshot
    version: int
    sums: Tensor = field(default_factory=lambda: torch.zeros(6, dtype=torch.float64))

    def add(self, sums: list[list[float]]) -> bool:
        """Add sums of `preferences`, one of each process; True if the evidence suffices."""
        self.sums += torch.tensor(sums, dtype=torch.float64).sum(0)
        total, squares, sizes, *_ = self.sums.tolist()
        if total <= 0:  # the engine agrees, so reset: earlier agreement must not mask a later failure
            self.sums.zero_()
        return total > 0 and total >= DEVIATIONS * squares**0.5 and total >= AGREEMENT * sizes

    def renew(self, version: int) -> None:
        """Begin again with a copy of the current weights, those of `version`."""
        self.snapshot.renew()
        self.version = version
        self.sums.zero_()

    def report(self, current: int) -> str:
        _, _, _, now, then, tokens = self.sums.tolist()
        return (
            f"the engine has stale weights: {int(tokens)} of its log-probs are explained better by weights of about"
            f" step {self.version} (mean difference {then / tokens:.2g} nats) than by those of step {current},"
            f" which it should sample with ({now / tokens:.2g}). It did not take an update, or not all of it: look at"
            " its `load_weights`, and at the log of its server."
        )


class VersionTest:
    """Evidence, gathered over a run, that earlier weights explain an engine's log-probs better than current ones."""

    def __init__(self, policy: Callable[[], nn.Module], version: Callable[[], int]):
        self._policy, self._version = policy, version  # the version is the number of optimizer steps
        self._old: Evidence | None = None
        self._last: Evidence | None = None  # of the last version that the engine had
        self._seen = self._compared = -1  # versions: the newest, and the newest whose difference is known
        self._age = self._comparisons = 0  # versions since the old copy, and comparisons with it
        self._largest = 0.0  # difference between engine and trainer so far: rounding

    def due(self) -> bool:
        """True if rollouts of the current weights are to be compared now; the same in every process."""
        version = self._version()
        if self._old is None:
            self._copy()
        elif version != self._seen:
            self._seen, self._age = version, self._age + 1
        assert self._old is not None
        return version != self._old.version and self._age >= COMPARED_AT[self._comparisons]

    def moved(self) -> bool:
        """True if rollouts of the current weights have not been compared yet; the same in every process."""
        return self._version() != self._compared

    @torch.no_grad()
    def difference(self, few: TrainBatch, rescore: Callable[[TrainBatch], Tensor]) -> list[float] | None:
        """This process's sum of differences between engine and current weights, and number of tokens."""
        current = rescore(few)
        if few.engine_logprobs is None:
            return None
        difference = (few.engine_logprobs - current)[few.sampled].double().abs()
        known = difference.isfinite()
        return [difference[known].sum().item(), known.sum().item()]

    def jumped(self, differences: list[list[float]]) -> bool:
        """True if the last version must be tested, because the difference, over all processes, is larger than ever."""
        total, tokens = (sum(column) for column in zip(*differences, strict=True)) if differences else (0.0, 0.0)
        if not tokens:
            return False
        first, self._compared = self._last is None, self._version()
        if not first and total / tokens > JUMP * self._largest:
            return True
        self._accept(total / tokens)
        return False

    def _accept(self, difference: float) -> None:
        """Take the engine to have the current weights, and keep a copy, which must not match at the next version."""
        self._largest = max(self._largest, difference)
        if self._last is None:
            self._last = Evidence(Snapshot(self._policy()), self._compared)
            return
        self._last.renew(self._compared)

    @torch.no_grad()
    def preferences(
        self, few: TrainBatch, rescore: Callable[[TrainBatch], Tensor], last: bool = False
    ) -> list[float] | None:
        """This process's sums over tokens: preferences, their squares and sizes, differences now and then, and a
        count."""
        evidence = self._last if last else self._old
        assert evidence is not None, "asked when due"
        current = rescore(few)
        with evidence.snapshot.in_place():
            earlier = rescore(few)
        if few.engine_logprobs is None:
            return None
        now, then = ((few.engine_logprobs - scored)[few.sampled].double().abs() for scored in (current, earlier))
        preference = ((now - then) / (now + then)).nan_to_num(0.0)
        known = (now + then).isfinite()
        columns = (preference, preference**2, preference.abs(), now, then, torch.ones_like(now))
        return [column[known].sum().item() for column in columns]

    def finding(self, sums: list[list[float]], last: bool = False) -> str | None:
        """The error text if the evidence suffices with these sums of `preferences`, one of each process."""
        evidence = self._last if last else self._old
        if not sums or evidence is None:
            return None
        found = evidence.report(self._version()) if evidence.add(sums) else None
        if last:
            if not evidence.sums.any():  # the current weights explain it better: rounding has grown
                self._accept(sum(share[3] for share in sums) / sum(share[5] for share in sums))
            return found
        self._comparisons = sum(age <= self._age for age in COMPARED_AT)
        if self._comparisons == len(COMPARED_AT):
            self._copy()
        return found

    def _copy(self) -> None:
        self._seen = self._version()
        sums = {} if self._old is None else {"sums": self._old.sums}
        self._old = Evidence(Snapshot(self._policy()), self._seen, **sums)
        self._age = self._comparisons = 0
