"""Transfers of the policy's weights to engines: when, and whether merged or as an adapter alone.

Every process calls `ensure_current` at the same place: either each loads an engine of its own, or all engines use the
same servers, and then the first process sends for all.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from covey.core.engine import RolloutEngine, WeightTransfer, WeightUpdate, traits_of
from covey.core.findings import CheckError
from covey.core.stats import Mean, Stat
from covey.policy.adapters import has_adapter, why_not_alone
from covey.policy.sharded_tensors import is_sharded
from covey.policy.weights import weight_update
from covey.trainer.distributed.collectives import Collectives

log = logging.getLogger(__name__)


@runtime_checkable
class SharedServers(Protocol):
    """An engine whose servers all processes share: one process sends the weights, the others learn of it."""

    def held(self) -> AbstractContextManager[None]: ...  # on every process: within it no request begins

    def export_state(self) -> Any: ...  # on the process that sent: picklable, what the others must know

    def import_state(self, version: int, state: Any) -> None: ...  # on the others: the servers hold `version`


@dataclass(eq=False)
class WeightSync:
    """Keeps an engine at the policy's version."""

    engine: RolloutEngine
    policy: Callable[[], Any]
    collectives: Collectives
    lora_sync: str = "auto"  # "adapter", "merged", or "auto": the adapter alone where both it and the engine allow that
    _sent: int | None = field(default=None, init=False)
    _base_sent: bool = field(default=False, init=False)
    _said: str | None = field(default=None, init=False)

    def forget(self) -> None:
        """Send the weights when they are next asked for, whatever their version: they have changed without a step."""
        self._sent = None

    def ensure_current(self, version: int) -> dict[str, Stat]:
        """Send the weights if they changed since the last time; metrics of it, if so."""
        if traits_of(self.engine).shares_policy or version == self._sent:
            return {}
        started = time.perf_counter()
        policy, dtype = self.policy(), traits_of(self.engine).dtype
        update = self._noticing(weight_update(policy, version, adapter_only=self._alone(policy), dtype=dtype))
        if self.collectives.size > 1 and isinstance(self.engine, SharedServers):
            with self.engine.held():  # no process begins requests any more, and the first one sends
                self.collectives.meet(f"begin to send weights of version {version}")
                sent = (self._lead if self.collectives.rank == 0 else self._follow)(self.engine, update)
        else:
            sent = self._load_each(update)
        self._sent = version
        whole = update.nbytes + (update.base.nbytes if update.base is not None and self._base_sent else 0)
        return {"sync/seconds": Mean(time.perf_counter() - started, 1.0), **transfer_stats(sent, whole)}

    def _noticing(self, update: WeightUpdate) -> WeightUpdate:
        """The update; reading its base model, which few servers lack, sets `_base_sent`."""
        self._base_sent = False
        if update.base is None:
            return update
        base = update.base

        def tensors() -> Iterator[tuple[str, Tensor]]:
            self._base_sent = True
            return base.tensors()

        return replace(update, base=replace(base, tensors=tensors))

    def _alone(self, policy: Any) -> bool:
        """True if the adapter is sent without its base model."""
        if self.lora_sync == "merged" or not has_adapter(policy):
            return False
        obstacle = why_not_alone(policy)
        if obstacle is None and not traits_of(self.engine).takes_adapters:
            obstacle = "the engine takes none: start its server with adapters enabled"
        if obstacle is None:
            return True
        if self.lora_sync == "adapter":
            evidence = f"vllm_lora_sync='adapter' sends the adapter alone, but {obstacle}."
            raise CheckError.of("adapter-alone", evidence, "Use 'merged' or 'auto'.")
        if obstacle != self._said:
            log.info("The adapter's weights are sent merged into the model's: %s.", obstacle)
            self._said = obstacle
        return False

    def _load_each(self, update: WeightUpdate) -> WeightTransfer | None:
        """Every process loads its own engine; one that cannot stops all."""
        purpose = f"load weights of {update.version}"
        try:
            sent = self.engine.load_weights(update)
        except Exception as error:
            self.collectives.gather(str(error), purpose)
            raise
        for rank, text in enumerate(self.collectives.gather(None, purpose)):
            if text is not None:
                raise RuntimeError(f"process {rank} could not load weights: {text}")
        return sent

    def _lead(self, engine: Any, update: WeightUpdate) -> WeightTransfer | None:
        """Send the weights from the first process. Where reading them is collective, call the others to each
        reading."""
        message = state = sent = None
        try:
            sent = engine.load_weights(self._announcing(update) if is_sharded(self.policy()) else update)
            state = engine.export_state(), self._base_sent, sent
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._from_first(("done", message, state), update.version)
        return sent

    def _follow(self, engine: Any, update: WeightUpdate) -> WeightTransfer | None:
        """Read the weights as often as the first process does, then note what the servers hold."""
        word, message, state = self._from_first(None, update.version)
        while word == "read":
            of = update if message == "update" else update.base
            assert of is not None, "both processes made the same update"
            for _ in of.tensors():
                pass
            word, message, state = self._from_first(None, update.version)
        if message is not None:
            raise RuntimeError(f"process 0 could not send the weights: {message}")
        engine_state, self._base_sent, sent = state
        engine.import_state(update.version, engine_state)
        return sent

    def _from_first(self, word: Any, version: int) -> Any:
        return self.collectives.gather(word, f"send weights of version {version}")[0]

    def _announcing(self, update: WeightUpdate) -> WeightUpdate:
        """The update, where every reading is begun and ended by all processes, even if the sender gives it up."""

        def read(of: WeightUpdate, name: str) -> WeightUpdate:
            def tensors() -> Iterator[tuple[str, Tensor]]:
                self._from_first(("read", name, None), of.version)
                one = of.tensors()
                try:
                    for pair in one:  # noqa: UP028 - `yield from` would close it where this is given up
                        yield pair
                finally:
                    for _ in one:
                        pass

            return WeightUpdate(of.version, of.specs, tensors, of.adapter)

        made = read(update, "update")
        return made if update.base is None else replace(made, base=read(update.base, "base"))


def transfer_stats(sent: WeightTransfer | None, whole: int) -> dict[str, Stat]:
    """Metrics of an update of `whole` bytes: all of them, or those that servers were sent on average."""
    if not isinstance(sent, WeightTransfer):  # an engine of a user's own may return anything
        return {"sync/bytes": Mean(whole, 1.0)}
    stats: dict[str, Stat] = {
        "sync/bytes": Mean(sent.nbytes, float(sent.servers)),
        "sync/whole_servers": Mean(sent.whole, 1.0),
    }
    return stats if sent.changed is None else {**stats, "sync/changed": Mean(sent.changed, 1.0)}
