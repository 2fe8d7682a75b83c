"""How the processes of a run meet: every exchange has a name and a deadline, and nobody waits for who will not come.

Before a process waits for the others, and whenever it turns to something else, it leaves a note in the run's key-value
store, which can be read without the others taking part. If they do not come, or one of them has ended, the error tells
from those notes what each was doing. Objects travel over a gloo group of their own: its waits can be watched and given
up, unlike those of NCCL, whose collectives start only once everybody has arrived (`together`). Not here: what is
exchanged. A further exchange is a call of `gather`, or of `together` around a torch collective.
"""

import itertools
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from covey.trainer.distributed.interruption import PeerFailure, interrupted_when

T = TypeVar("T")

LOOK_EVERY = 1.0
"""Seconds between two looks at whether another process has failed, while waiting."""
STORE_SECONDS = 10.0
"""Seconds that the store has to answer; it is gone when the process that holds it is."""
GROUP_GRACE = 5.0
"""Seconds by which gloo's own deadline is later than ours, so that ours speaks first."""

_numbers = itertools.count()


class CollectiveError(RuntimeError):
    """The processes of a run did not come together: one is late, has failed or is gone."""


class Collectives:
    """Exchanges between the processes of a run. With one process every call returns at once.

    Args:
        rank, size: this process, and how many there are.
        seconds: how long a process waits for the others.
        step: the optimizer step, for messages.

    Example:
        >>> alone = Collectives(rank=0, size=1, seconds=1800.0, step=lambda: 12)
        >>> alone.gather("mine", "gather the rewards")
        ['mine']
    """

    def __init__(self, rank: int, size: int, seconds: float, step: Callable[[], int]):
        self.rank, self.size, self.seconds = rank, size, seconds
        self._step = step
        self._watched = False
        self._stretches = 0
        self._failures: list[str] = []
        """Where a failure of others would stand: of this stretch, and of the one before unless it failed here, too."""
        if size > 1:
            # Every process makes its trainers in the same order, so this number is the same on all of them.
            self._store = dist.PrefixStore(f"covey/{next(_numbers)}", _get_default_store())
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds + GROUP_GRACE))
            self.note("starting")

    def gather(self, mine: Any, what: str) -> list[Any]:
        """Exchange objects: this process's in, those of all processes out, in the order of ranks.

        Args:
            mine: anything that pickles; tensors on the CPU.
            what: what this is for, as in "gather the rewards of generation 12"; the same on every process.

        Raises:
            CollectiveError: another process is late, has failed or is gone; or it gathers something else.
        """
        if self.size == 1:
            return [mine]
        with self._waiting(what) as finish:
            data = torch.frombuffer(bytearray(pickle.dumps((what, mine))), dtype=torch.uint8)
            sizes = list(torch.zeros(self.size, 1, dtype=torch.int64))
            finish(dist.all_gather(sizes, torch.tensor([len(data)]), self._group, async_op=True))
            parts = list(torch.empty(self.size, int(max(sizes)), dtype=torch.uint8))
            padded = torch.nn.functional.pad(data, (0, len(parts[0]) - len(data)))
            finish(dist.all_gather(parts, padded, self._group, async_op=True))
        found = [pickle.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(parts, sizes, strict=True)]
        if any(other != what for other, _ in found):
            doing = "; ".join(f"rank {rank}: {other}" for rank, (other, _) in enumerate(found))
            raise CollectiveError(f"step {self._step()}: the processes are not at the same point of the run: {doing}.")
        return [theirs for _, theirs in found]

    def named(self, what: str) -> Callable[[Any], list[Any]]:
        """`gather` for one purpose."""
        return partial(self.gather, what=what)

    def meet(self, what: str) -> None:
        """Wait until every process is here."""
        self.gather(None, what)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around collectives of torch: they start once every process has arrived, and their errors get a name.

        Raises:
            CollectiveError: another process does not come, has failed or is gone.
        """
        self.meet(what)
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not is_of_torch_distributed(error):
                raise
            raise self._broken(what, error) from error

    @contextmanager
    def ending_all(self) -> Iterator[None]:
        """An exception that leaves this context ends the other processes too.

        They find out where they wait for one another; one that is at work elsewhere is interrupted. Processes that have
        all failed may begin anew.

        Raises:
            CollectiveError: another process failed while this one was at work.
        """
        if self.size == 1 or self._watched:
            yield
            return
        self._watched = True
        self._stretches += 1
        self._failures = [*self._failures[-1:], f"failed/{self._stretches}"]
        try:
            with interrupted_when(self._others_failure):
                yield
        except PeerFailure as interruption:
            self._failures = []
            raise CollectiveError(str(interruption)) from None
        except BaseException as error:
            if is_of_torch_distributed(error):
                error.add_note(self._report(self._failure()))
            self._publish(error, self._failures[-1])
            self._failures = []
            raise
        finally:
            self._watched = False

    def note(self, doing: str) -> None:
        """Leave word of what this process turns to."""
        if self.size > 1:
            note = json.dumps({"step": self._step(), "doing": doing, "since": time.time()})
            _within(STORE_SECONDS, lambda: self._store.set(f"doing/{self.rank}", note), None)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[Callable[[Any], None]]:
        """Gives a function that waits for a piece of work, all pieces together no longer than the deadline."""
        deadline = time.monotonic() + self.seconds
        self.note(f"waiting to {what}")

        def finish(work: Any) -> None:
            while not _done(work, min(LOOK_EVERY, max(deadline - time.monotonic(), 0.001))):
                if self._failure():
                    raise self._error(what, "another process failed")
                if time.monotonic() >= deadline:
                    raise self._error(what, f"not every process came within {self.seconds:g} s (ddp_timeout)")

        try:
            yield finish
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._broken(what, error) from error
        self.note(f"at work since it could {what}")

    def _others_failure(self) -> str | None:
        """What to say to whoever is at work while another process has failed; None while none has."""
        failure = self._failure()
        if failure is None:
            return None
        return (
            f"step {self._step()}: rank {self.rank} of {self.size} was at work when another process failed.\n"
            f"{self._report(failure)}"
        )

    def _broken(self, what: str, error: BaseException) -> CollectiveError:
        """A process is gone; most have said why."""
        said = str(error).split("\n")[0][:300]
        return self._error(what, "another process failed" if self._failure() else f"the connection broke ({said})")

    def _error(self, what: str, problem: str) -> CollectiveError:
        return CollectiveError(
            f"step {self._step()}: rank {self.rank} of {self.size} waited to {what}, but {problem}.\n"
            f"{self._report(self._failure())}"
        )

    def _report(self, failure: dict[str, Any] | None) -> str:
        """Who failed, if that is known, and what every process was doing last."""
        if failure is not None:
            happened = f"Rank {failure['rank']} ended at step {failure['step']} with {failure['error']}"
        else:
            happened = (
                "No process has said that it failed. One that is gone was killed, for lack of memory for instance: its"
                " own log and the system's tell. One that is only slow needs a larger ddp_timeout."
            )
        notes = self._read([f"doing/{rank}" for rank in range(self.size)])
        return "\n".join([happened, "What each process was doing last:", *map(_as_line, itertools.count(), notes)])

    def _publish(self, error: BaseException, key: str) -> None:
        """Let the others know; the first failure is the one that counts."""
        failure = {"rank": self.rank, "step": self._step(), "error": f"{type(error).__name__}: {error}"[:4000]}
        _within(STORE_SECONDS, lambda: self._store.compare_set(key, "", json.dumps(failure)), None)

    def _failure(self) -> dict[str, Any] | None:
        return next((found for found in self._read(self._failures) if found is not None), None)

    def _read(self, keys: list[str]) -> list[dict[str, Any] | None]:
        """What the store holds under each key; None where there is nothing or nobody answers."""

        def read() -> list[dict[str, Any] | None]:
            return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]

        return _within(STORE_SECONDS, read, [None] * len(keys))


def _as_line(rank: int, note: dict[str, Any] | None) -> str:
    if note is None:
        return f"  rank {rank}: unknown: it left no note, or the process that held the notes is gone"
    return f"  rank {rank}: step {note['step']}: {note['doing']} (for {time.time() - note['since']:.0f} s)"


def is_of_torch_distributed(error: BaseException) -> bool:
    """Whether an error says that the connection between processes failed, rather than anything of this process."""
    if isinstance(error, CollectiveError):
        return False  # it has a name already
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _done(work: Any, seconds: float) -> bool:
    """Whether a collective is done after waiting for at most `seconds`; raises what it ended with."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _within(seconds: float, function: Callable[[], T], otherwise: T) -> T:
    """`function()`, or `otherwise` if it raises or takes longer: the store may be gone with who held it."""
    outcome = [otherwise]

    def run() -> None:
        try:
            outcome[0] = function()
        except Exception:  # no store, no note
            return

    thread = threading.Thread(target=run, name="covey-store", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]
