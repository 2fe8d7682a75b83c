"""Collectives with names, deadlines and failure reports.

Each process notes its activity in the run's key-value store, so that an error lists what every process was doing.
Objects travel over gloo, as waiting for it can be interrupted; NCCL starts once all have met (`Collectives.together`).
"""

import atexit
import io
import itertools
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from covey.runtime.deadlines import LateCalls, WorkerThread

T = TypeVar("T")

LOOK_EVERY = 1.0  # seconds between two checks for failures of other processes, while waiting
STORE_SECONDS = 10.0  # deadline of the store, which ends with the process that holds it
GROUP_GRACE = 5.0  # seconds by which gloo's own deadline is later than ours, so that ours is the one that is reported
WATCH_EVERY = 2.0  # seconds between two such checks, while this process computes
PATIENCE = 3.0  # seconds before the interruption: a main thread that waits for others notices the failure itself
LAST_RESORT = 60.0  # seconds from the interruption to the end of a process that does not react to it
EXIT_SECONDS = 0.2  # for gloo's threads when Python exits
CAN_INTERRUPT = hasattr(signal, "pthread_kill") and hasattr(signal, "SIGURG")
"""SIGURG is ignored by default and rarely used; SIGINT does not reach a background process of a shell."""

ALIGNMENT = 16  # bytes; tensors in a message begin at multiples of it, as views of any dtype require

_numbers = itertools.count()


class CollectiveError(RuntimeError):
    """A collective failed: another process is late, has failed or is gone."""


class Collectives:
    """Exchanges between the processes of a run. With one process every call returns at once."""

    def __init__(self, rank: int, size: int, seconds: float, step: Callable[[], int]):
        self.rank, self.size, self.seconds = rank, size, seconds
        self._step = step
        self._watched = False
        self._runs = 0
        self._failures: list[str] = []  # store keys, of this run of `ending_all` and the one before unless that failed
        if size > 1:
            # Every process creates its trainers in the same order, so the number is the same on all of them.
            self._store = dist.PrefixStore(f"covey/{next(_numbers)}", _get_default_store())
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds + GROUP_GRACE))
            self.note("starting")

    def gather(self, mine: Any, what: str) -> list[Any]:
        """Exchange objects: each process gives one and receives those of all, in the order of ranks."""
        if self.size == 1:
            return [mine]
        with self._waiting(what) as finish:
            data = pack((what, mine))
            sizes = list(torch.zeros(self.size, 1, dtype=torch.int64))
            finish(dist.all_gather(sizes, torch.tensor([len(data)]), self._group, async_op=True))
            parts = list(torch.empty(self.size, int(max(sizes)), dtype=torch.uint8))
            padded = torch.nn.functional.pad(data, (0, len(parts[0]) - len(data)))
            finish(dist.all_gather(parts, padded, self._group, async_op=True))
        received = [unpack(part) for part in parts]
        if any(other != what for other, _ in received):
            doing = "; ".join(f"rank {rank}: {other}" for rank, (other, _) in enumerate(received))
            raise CollectiveError(f"step {self._step()}: the processes are not at the same point of the run: {doing}.")
        return [theirs for _, theirs in received]

    def exchange(self, outgoing: list[Any], what: str) -> list[Any]:
        """Send one object to each process, and receive one from each, in the order of ranks; None sends nothing."""
        if self.size == 1:
            return outgoing
        messages = [torch.empty(0, dtype=torch.uint8) if one is None else pack(one) for one in outgoing]
        sizes = self.gather([len(message) for message in messages], what)
        incoming = [theirs[self.rank] for theirs in sizes]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        if any(map(any, sizes)):
            with self._waiting(what) as finish:
                sent, own = torch.cat(messages), sizes[self.rank]
                finish(dist.all_to_all_single(received, sent, incoming, own, group=self._group, async_op=True))
        return [unpack(part) if len(part) else None for part in received.split(incoming)]

    def to_first(self, mine: Any, what: str) -> list[Any]:
        """Send an object to the first process, which gets those of all, in the order of ranks; others get none."""
        received = self.exchange([mine, *[None] * (self.size - 1)], what)
        return received if self.rank == 0 else []

    def named(self, what: str) -> Callable[[Any], list[Any]]:
        return partial(self.gather, what=what)

    def meet(self, what: str) -> None:
        """Wait until every process has arrived here. Collective."""
        self.gather(None, what)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Start collectives of torch only when every process has arrived, and name their errors."""
        self.meet(what)
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not is_of_torch_distributed(error):
                raise
            raise self._broken(what, error) from error

    @contextmanager
    def ending_all(self) -> Iterator[None]:
        """End the other processes too when an exception leaves this context."""
        if self.size == 1 or self._watched:
            yield
            return
        self._watched = True
        self._runs += 1
        self._failures = [*self._failures[-1:], f"failed/{self._runs}"]
        try:
            with interrupted_when(self._others_failure):
                yield
        except PeerFailure as interruption:
            self._failures = []
            raise CollectiveError(str(interruption)) from None
        except BaseException as error:
            if is_of_torch_distributed(error):
                error.add_note(self._report(self._failure()))
            failure = {"rank": self.rank, "step": self._step(), "error": f"{type(error).__name__}: {error}"[:4000]}
            key, self._failures = self._failures[-1], []
            _in_time(lambda: self._store.compare_set(key, "", json.dumps(failure)), None)
            raise
        finally:
            self._watched = False

    def note(self, doing: str) -> None:
        """Write into the store what this process is doing, for error messages of the others."""
        if self.size > 1:
            note = json.dumps({"step": self._step(), "doing": doing, "since": time.time()})
            _in_time(lambda: self._store.set(f"doing/{self.rank}", note), None)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[Callable[[Any], None]]:
        """Yield a function that waits for one piece of work; all pieces share one deadline."""
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
        self.note(f"at work after the exchange to {what}")

    def _others_failure(self) -> str | None:
        """Message for this process when another fails while it is busy; None while none has failed."""
        if (failure := self._failure()) is None and not _in_time(self._store_is_gone, False):
            return None
        here = f"step {self._step()}: rank {self.rank} of {self.size} was at work when another process failed."
        return f"{here}\n{self._report(failure)}"

    def _store_is_gone(self) -> bool:
        """True once the process that holds the store has ended, which may be too soon to read why."""
        with suppress(Exception):  # the connection broke
            self._store.check([f"doing/{self.rank}"])
            return False
        return True

    def _broken(self, what: str, error: BaseException) -> CollectiveError:
        reason = str(error).split("\n")[0][:300]
        return self._error(what, "another process failed" if self._failure() else f"the connection broke ({reason})")

    def _error(self, what: str, problem: str) -> CollectiveError:
        here = f"step {self._step()}: rank {self.rank} of {self.size} waited to {what}, but {problem}."
        return CollectiveError(f"{here}\n{self._report(self._failure())}")

    def _report(self, failure: dict[str, Any] | None) -> str:
        """The process that failed, if known, and the last activity of every process."""
        if failure is not None:
            happened = f"Rank {failure['rank']} ended at step {failure['step']} with {failure['error']}"
        else:
            happened = (
                "No process has reported a failure. If one is gone, it was killed, for lack of memory for instance: see"
                " its log and the system's. If one is only slow, raise ddp_timeout."
            )
        notes = self._read([f"doing/{rank}" for rank in range(self.size)])
        unknown = "unknown: it left no note, or the process that held the notes is gone"
        known = "step {step}: {doing} (for {seconds:.0f} s)"
        words = [unknown if n is None else known.format(**n, seconds=time.time() - n["since"]) for n in notes]
        lines = [f"  rank {rank}: {text}" for rank, text in enumerate(words)]
        return "\n".join([happened, "What each process was doing last:", *lines])

    def _failure(self) -> dict[str, Any] | None:
        return next((found for found in self._read(self._failures) if found is not None), None)

    def _read(self, keys: list[str]) -> list[dict[str, Any] | None]:
        def read() -> list[dict[str, Any] | None]:
            return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]

        return _in_time(read, [None] * len(keys))


@atexit.register
def _let_gloo_finish() -> None:
    """Let gloo's threads free the tensors of the last collectives, for which they need the GIL.

    One that waits for it while Python exits aborts the process, and destroying a group ends its threads only where
    nothing refers to the group any more: a model of DDP does.
    """
    if next(_numbers):
        time.sleep(EXIT_SECONDS)


class PeerFailure(KeyboardInterrupt):
    """Raised in the main thread; passes wherever Ctrl-C does, as through calls of reward functions."""


@contextmanager
def interrupted_when(reason: Callable[[], str | None]) -> Iterator[None]:
    """Interrupt the main thread within this context once there is a reason; end a process that does not react."""
    left = threading.Event()
    caller = threading.get_ident() if CAN_INTERRUPT and threading.current_thread() is threading.main_thread() else None
    found: list[str] = []

    def watch() -> None:
        while not left.wait(WATCH_EVERY):
            if (text := reason()) is None:
                continue
            found.append(text)
            if left.wait(PATIENCE):
                return
            if caller is not None:
                signal.pthread_kill(caller, signal.SIGURG)
            if not left.wait(LAST_RESORT):
                print(text, file=sys.stderr, flush=True)
                os._exit(1)
            return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if found and not left.is_set():
            raise PeerFailure(found[0])

    previous = signal.signal(signal.SIGURG, interrupt) if caller is not None else None
    watcher = threading.Thread(target=watch, name="covey-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        try:
            watcher.join()  # which Ctrl-C may interrupt
        finally:
            if caller is not None:
                signal.signal(signal.SIGURG, previous)


def pack(value: Any) -> Tensor:
    """A picklable object as bytes: number and sizes of parts, its pickle, then its tensors as they lie in memory."""
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _TensorPickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [np.asarray(memory) for memory in (file.getbuffer(), *(one.raw() for one in buffers))]
    head = np.array([len(parts), *map(len, parts)]).view(np.uint8)
    pieces = [piece for part in (head, *parts) for piece in (part, np.zeros(-len(part) % ALIGNMENT, np.uint8))]
    return torch.from_numpy(np.concatenate(pieces))


def unpack(message: Tensor) -> Any:
    """The object that was packed; its tensors are views of the message."""
    data = message.numpy()
    count = int(data[:8].view(np.int64)[0])
    end = 8 + 8 * count
    parts: list[Any] = []
    for size in data[8:end].view(np.int64).tolist():
        start = end + -end % ALIGNMENT
        end = start + size
        parts.append(data[start:end])
    return pickle.loads(parts[0], buffers=parts[1:])


class _TensorPickler(pickle.Pickler):
    """Sets the memory of tensors aside, once each."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        data: Any = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor_in, (pickle.PickleBuffer(data), obj.dtype, obj.shape)


def _tensor_in(memory: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(memory).view(dtype).view(shape) if len(memory) else torch.empty(shape, dtype=dtype)


def is_of_torch_distributed(error: BaseException) -> bool:
    """True for a failed connection between processes, rather than a failure of this process."""
    if isinstance(error, CollectiveError):
        return False  # it has a name already
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _done(work: Any, seconds: float) -> bool:
    """Wait for a collective for at most `seconds`; True when it is done. Raises the error it ended with."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _in_time(function: Callable[[], T], otherwise: T) -> T:
    """`function()`, or `otherwise` if it raises or is late, as when the process that holds the store is gone."""
    if _late.is_full:
        return otherwise
    with closing(WorkerThread("covey-store")) as worker, suppress(Exception):
        return worker.call(function, STORE_SECONDS, _late)
    return otherwise


_late = LateCalls("the store of the processes")
