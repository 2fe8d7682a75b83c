"""Sign test, throughout a run, of whether an engine samples with the weights that it acknowledged.

Versions that servers and engines report (`WeightSender.stamp`, `Completion.versions`) repeat what they were sent. They
show a server that was restarted, and not an engine that skips tensors of other names, merges no adapter or keeps its
packed output head. The check at the start (`parity`) misses these too: an update at a usual learning rate changes
log-probs by less than rounding explains. Training then goes wrong without an error, so this test looks at the samples.

A few fresh rollouts are scored twice, with the current weights and with a copy of earlier ones. Each token has a
preference, from -1 to 1, for the version whose log-prob is closer to the engine's: by rounding preferences cancel, and
after missed updates they have one sign. Where the current weights win, the engine has them, and they are copied for the
next comparison. Where neither wins, as rounding hides the difference, the copy is kept until enough updates add up.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from covey.core.batch import TrainBatch
from covey.policy.sharded_tensors import own_shard, reshard

COPIED_BYTES = 2**28  # most that a process copies; with a part of the weights alone the test is less sensitive
DEVIATIONS = 6.0
"""Sum of preferences over the root of their sum of squares at which one version wins.

Where each preference is as likely to have either sign, the chance to reach it is at most exp(-6²/2) = 1.5e-8 (Efron
1969, "Student's t-test under symmetry conditions").
"""

AGREEMENT = 0.5  # least sum of preferences over that of their sizes: 0 if they cancel, 1 if all are for one version


class Snapshot:
    """Copies on the CPU of a model's trained weights (this process's shards), smallest first, up to `limit` bytes."""

    def __init__(self, model: nn.Module, limit: int = COPIED_BYTES):
        self._model = model
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []
        reshard(model)  # a gathered weight of FSDP2 is freed later, and writing to it changes no shard
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in sorted(trained, key=lambda weight: _own(weight).nbytes):
            limit -= _own(weight).nbytes
            if limit < 0:
                break
            self._pairs.append((weight, _own(weight).to("cpu", copy=True)))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the copies in the place of the weights within the context; afterwards these are as before, to the bit."""
        current = [_own(weight).clone() for weight, _ in self._pairs]
        try:
            self._write(copy for _, copy in self._pairs)
            yield
        finally:
            self._write(current)

    def _write(self, values: Iterable[Tensor]) -> None:
        for (weight, _), value in zip(self._pairs, values, strict=True):
            _own(weight).copy_(value)
        reshard(self._model)  # what it gathered is of the weights before


def _own(weight: nn.Parameter) -> Tensor:
    """Shard in the memory where it is now: offloading a policy moves its weights."""
    return own_shard(weight).detach()


class StaleWeightsTest:
    """Evidence, gathered over a run, that earlier weights explain an engine's log-probs better than current ones.

    The version is the number of optimizer steps. `spacing` is how many versions pass between a comparison that the
    current weights won and the next one.
    """

    def __init__(self, policy: Callable[[], nn.Module], version: Callable[[], int], spacing: int = 1):
        self._policy, self._version, self._spacing = policy, version, spacing
        self._snapshot: Snapshot | None = None
        self._copied = self._seen = -1  # versions: of the copy, and the newest
        self._age, self._next = 0, 1  # versions since the copy, and how many there are at the next comparison
        self._sums = torch.zeros(6, dtype=torch.float64)  # of `preferences`, over processes and comparisons

    def due(self) -> bool:
        """True if rollouts of the current weights are to be compared now; the same in every process."""
        version = self._version()
        if self._snapshot is None:
            self._copy()
        elif version != self._seen:
            self._seen, self._age = version, self._age + 1
        return self._age >= self._next

    @torch.no_grad()
    def preferences(self, few: TrainBatch, rescore: Callable[[TrainBatch], Tensor]) -> list[float] | None:
        """This process's sums over tokens: preferences, their squares and sizes, differences from the current and from
        the earlier weights, and a count; None where the engine reported no log-probs."""
        assert self._snapshot is not None, "asked when due"
        current = rescore(few)
        with self._snapshot.in_place():
            earlier = rescore(few)
        if few.engine_logprobs is None:
            return None
        now, then = ((few.engine_logprobs - scored)[few.sampled].double().abs() for scored in (current, earlier))
        preference = ((now - then) / (now + then)).nan_to_num(0.0)
        known = (now + then).isfinite()
        columns = (preference, preference**2, preference.abs(), now, then, torch.ones_like(now))
        return [column[known].sum().item() for column in columns]

    def finding(self, sums: list[list[float]]) -> str | None:
        """Error text if the evidence suffices with these sums of `preferences`, one of each process."""
        if not sums:
            return None
        self._next = 2 * self._age
        latest = torch.tensor(sums, dtype=torch.float64).sum(0)
        self._sums += latest
        if _wins(*self._sums[:3].tolist()):
            now, then, tokens = self._sums[3:].tolist()
            return (
                f"the engine has stale weights: {int(tokens)} of its log-probs are explained better by weights of about"
                f" step {self._copied} (mean difference {then / tokens:.2g} nats) than by those of step"
                f" {self._version()}, which it should sample with ({now / tokens:.2g}). It did not take an update, or"
                " not all of it: look at its `load_weights`, and at the log of its server."
            )
        if _wins(-latest[0].item(), *latest[1:3].tolist()):
            self._copy()
            self._next = self._spacing
        elif self._sums[0] <= 0:  # the engine agrees, so reset: earlier agreement must not mask a later failure
            self._sums.zero_()
        return None

    def _copy(self) -> None:
        self._snapshot, self._copied = Snapshot(self._policy()), self._version()
        self._seen, self._age, self._next = self._copied, 0, 1
        self._sums.zero_()


def _wins(total: float, squares: float, sizes: float) -> bool:
    """True if a sum of preferences for a version, with that of their squares and sizes, is beyond chance."""
    return total > 0 and total >= DEVIATIONS * squares**0.5 and total >= AGREEMENT * sizes
