"""Answers to requests: sessions, training clients, samplers and saved states.

Each route has a method, which takes the request's JSON (or message) and gives the answer. Methods run on the event loop
and compute nothing themselves: the worker runs their jobs.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from covey.engines.native.adapter_engine import LowRank
from covey.runtime.process_memory import is_out_of_memory
from covey.runtime.safe_text import printable
from covey.runtime.user_code import format_error
from covey.tinker import requests
from covey.tinker.adapter import Adapter
from covey.tinker.checkpoints import (
    Checkpoint,
    CheckpointStore,
    TrainingRun,
    adapter_of,
    checked_name,
    load_moments,
    moments_of,
)
from covey.tinker.errors import Refusal
from covey.tinker.journal import (
    DONE,
    FAILED,
    NOT_RUN,
    ClientEntry,
    Journal,
    RequestEntry,
    Result,
    SamplerEntry,
    Sent,
    snapshot_file,
)
from covey.tinker.learner import Base, Learner
from covey.tinker.losses import HOSTED_ONLY, LOSSES, Loss, loss_of
from covey.tinker.requests import Body, lifetime, value_of, whole
from covey.tinker.sampling import answered, engine_request, scores_prompt, seed_of
from covey.tinker.state import PATIENCE, Operation, Promises, Sequencer, failed
from covey.tinker.wire import (
    ForwardBackward,
    read_forward_backward,
    request_of,
    write_forward_backward,
    write_sampled,
)
from covey.tinker.work import WeightSnapshot, Worker

SILENT = 3600.0  # seconds without a request after which a session ends
KEPT_SAMPLERS = 8  # unnamed samplers of a training client that can be sampled from, the newest
MOST_SAMPLES = 1024  # of one request
METADATA = 16 << 10  # most characters of a request's metadata
NEWEST_TESTED = (0, 38)  # version of the client
CHANGING = ("create_model", "load_weights", "optim_step")  # operations after which weights are others


@dataclass(frozen=True)
class Settings:
    """Settings of a server."""

    names: tuple[str, ...]  # of the model; answers give the first
    tokenizer_id: str | None = None  # where clients on this machine find the tokenizer
    max_clients: int = 8
    max_rank: int = 128
    max_waiting: int = 4096  # requests of samples that wait
    max_waiting_bytes: int = 1 << 30  # of training requests that wait; the one that is next in order always may
    seed: int = 0
    substitute: Mapping[str, str] = field(
        default_factory=dict
    )  # from the name of a loss that is asked for to the one that is used
    patience: float = PATIENCE
    client_config: Mapping[str, Any] = field(default_factory=dict)  # flags that are sent to clients


@dataclass(eq=False)
class Session:
    """A program that uses the server."""

    id: str
    sdk_version: str
    seen: float  # time of its last request
    clients: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Trained:
    """A training client. Its learner is made by its first job, and used by jobs alone."""

    run: TrainingRun
    session: str
    number: int  # within its session
    sequencer: Sequencer
    learner: Learner | None = None
    broken: str | None = None  # failure of a forward_backward since the last step
    samplers: list[str] = field(default_factory=list)  # unnamed ones, the oldest first
    saved_at: int = 0  # step of the last saved state
    seen: float = 0.0


@dataclass(eq=False)
class Sampler:
    """Weights that a program samples from."""

    id: str
    session: str
    number: int  # within its session
    path: str | None = None
    snapshot: WeightSnapshot | None = None  # None: the model alone
    client: str | None = None  # whose unnamed sampler it is
    gone: str | None = None  # why it cannot be sampled from any more


class TinkerService:
    """All state of a server."""

    def __init__(
        self,
        settings: Settings,
        base: Base,
        worker: Worker,
        store: CheckpointStore,
        ends: set[int],
        log: Callable[[str], None] = lambda line: None,
        say: Callable[[str], None] | None = None,
        journal: Journal | None = None,
    ):
        """`log` takes a line for each operation, `say` what whoever started the server must know (else `log`)."""
        self.settings, self.base, self.worker, self.store = settings, base, worker, store
        self.journal = journal or Journal()
        self.promises = Promises(self.journal)
        self.clients: dict[str, Trained] = {}
        self.samplers: dict[str, Sampler] = {}
        self.sessions: dict[str, Session] = {}
        self.downloads: dict[str, tuple[Any, float]] = {}  # by key: a folder, and until when
        self._snapshots = WeakValueDictionary[str, WeightSnapshot]()  # of saved states, while a sampler uses them
        self._ends = ends
        shown = say or log
        self._log: Callable[[str], None] = lambda line: log(printable(line))
        self._say: Callable[[str], None] = lambda line: shown(printable(line))
        self._sampling = 0
        self._training_bytes = 0  # of training requests that have no result
        self._started = time.strftime("%H:%M:%S")
        self._numbers = sum(parameter.numel() for parameter in base.model.parameters())

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def create_session(self, body: Body) -> dict[str, Any]:
        version = value_of(body, "sdk_version", str, "")
        _check_metadata(body)
        session = Session(secrets.token_hex(8), version, time.monotonic())
        self.sessions[session.id] = session
        self.journal.begin(session.id, version)
        answer = {"type": "create_session", "session_id": session.id}
        if _version(version) > NEWEST_TESTED:
            tested = ".".join(map(str, NEWEST_TESTED))
            answer["info_message"] = f"Covey's server was tested with clients up to {tested}; this one is {version}."
        if self.settings.substitute:
            changed = "; ".join(f"{old} is {new} here" for old, new in self.settings.substitute.items())
            answer["warning_message"] = f"Losses are substituted: {changed}."
        self._log(f"session {session.id} begins (client {version})")
        return answer

    def session_heartbeat(self, body: Body) -> dict[str, Any]:
        self._session(body)
        return {"type": "session_heartbeat"}

    async def finish_session(self, session_id: str) -> dict[str, Any]:
        if session_id in self.sessions:
            await self._end(self.sessions[session_id])
        return {}

    async def end_silent_sessions(self) -> None:
        """End sessions that have sent nothing for `SILENT` seconds."""
        for session in list(self.sessions.values()):
            if time.monotonic() - session.seen > SILENT:
                await self._end(session)

    async def stop(self) -> None:
        """Free everything at the end of the server. States that nothing has saved are saved first.

        Operations that have not begun are not run. With a journal another server runs them.
        """
        self.journal.close()
        for trained in self.clients.values():
            trained.sequencer.close(at_once=True)
        self.worker.drop_waiting()
        for session in list(self.sessions.values()):
            await self._end(session)

    async def _end(self, session: Session) -> None:
        """Free a session's clients and samplers. A state that nothing has saved is saved first."""
        self.sessions.pop(session.id, None)
        for model_id in session.clients:
            trained = self.clients.pop(model_id, None)
            if trained is not None:
                trained.sequencer.close()
                await trained.sequencer.ended()
                await self._save_unsaved(trained)
        for sampler_id in session.samplers:
            self._drop_sampler(sampler_id)
            self.samplers.pop(sampler_id, None)
        self.promises.drop(session.id)
        self.journal.end(session.id)
        self._log(f"session {session.id} ends")

    async def _save_unsaved(self, trained: Trained) -> None:
        """Save a state that nothing has saved, and say where."""
        learner = trained.learner
        if learner is None or learner.steps <= trained.saved_at:
            return
        name = f"unsaved-{learner.steps:06d}"
        job = self._save_job(trained, "weights", name, {"overwrite": True})
        try:
            path = (await asyncio.wrap_future(self.worker.run(job)))["path"]
        except Exception as error:  # whatever it is, the rest of the session is freed
            self._say(f"the state of {trained.run.id} after {learner.steps} steps could not be saved: {error}")
        else:
            place = self.store.find(path)[1]
            self._say(f"{trained.run.id} had not saved its state after {learner.steps} steps: it is {path} ({place})")

    def _session(self, body: Body) -> Session:
        return self._known_session(value_of(body, "session_id", str))

    def _known_session(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise Refusal(self._unknown("session", session_id), 410)
        session = self.sessions[session_id]
        session.seen = time.monotonic()
        return session

    def _unknown(self, what: str, name: str) -> str:
        return (
            f"this server started at {self._started} and knows no {what} {name[:200]!r}. Continue from the last"
            " checkpoint: run the recipe again with behavior_if_log_dir_exists=resume."
        )

    # ---- training clients --------------------------------------------------------------------------------------------

    def create_model(self, body: Body) -> dict[str, Any]:
        session, number = self._session(body), value_of(body, "model_seq_id", int, least=0)
        model_id, sent = f"{session.id}:train:{number}", Sent.of("create_model", body)
        if (known := self.promises.repeated(f"{model_id}/0", sent)) is not None:
            return known
        name = self._served(value_of(body, "base_model", str))
        seed = seed_of(self.settings.seed, "adapter", number)
        spec = requests.adapter_spec(body, seed, self.settings.max_rank)
        run = TrainingRun(model_id, name, self._numbers, spec, _check_metadata(body), time.time())
        trained = self._new_client(session, run, number)

        def make() -> dict[str, Any]:
            trained.learner = Learner(self.base, Adapter.new(self.base.model, spec))
            self.store.note(run)
            return {"type": "create_model", "model_id": model_id}

        return self._queue(trained, 0, sent, "create_model", make)

    def load_weights(self, body: Body) -> dict[str, Any]:
        if body.get("model_id") is not None:
            return self._load_into(body)
        session, number = self._session(body), value_of(body, "model_seq_id", int, least=0)
        model_id, sent = f"{session.id}:train:{number}", Sent.of("load_weights", body)
        if (known := self.promises.repeated(f"{model_id}/0", sent)) is not None:
            return known
        path = value_of(body, "path", str)
        saved, _ = self.store.find(path)
        if saved.spec.rank > self.settings.max_rank:
            raise Refusal(f"{path} has rank {saved.spec.rank}: start the server with --max-rank {saved.spec.rank}.")
        metadata = {**saved.user_metadata, **_check_metadata(body)}
        run = TrainingRun(model_id, saved.base_model, self._numbers, saved.spec, metadata, time.time())
        trained = self._new_client(session, run, number)
        optimizer = value_of(body, "optimizer", bool, False)

        def load() -> dict[str, Any]:
            _, trained.learner = self.store.load(path, self.base, optimizer=optimizer)
            trained.saved_at = trained.learner.steps
            self.store.note(run)
            return {"type": "load_weights", "path": path, "model_id": model_id}

        return self._queue(trained, 0, sent, "create_model", load)

    def _load_into(self, body: Body) -> dict[str, Any]:
        """The older form: replace the state of a client that exists."""
        path, optimizer = value_of(body, "path", str), value_of(body, "optimizer", bool, False)
        trained = self._client(body)

        def load() -> dict[str, Any]:
            saved, learner = self.store.load(path, self.base, optimizer=optimizer)
            if saved.spec.rank != trained.run.spec.rank:
                raise Refusal(f"{path} has rank {saved.spec.rank}, and this client {trained.run.spec.rank}.")
            trained.learner, trained.saved_at, trained.broken = learner, learner.steps, None
            return {"type": "load_weights", "path": path, "model_id": trained.run.id}

        return self._queue(trained, _number(body), Sent.of("load_weights", body), "load_weights", load)

    def get_info(self, body: Body) -> dict[str, Any]:
        run = self._client(body).run
        data = {"model_name": run.base_model, "tokenizer_id": self.settings.tokenizer_id or run.base_model}
        return {
            "type": "get_info",
            "model_id": run.id,
            "model_name": run.base_model,
            "model_data": data,
            "is_lora": True,
            "lora_rank": run.spec.rank,
        }

    def unload_model(self, body: Body) -> dict[str, Any]:
        model_id, sent = value_of(body, "model_id", str), Sent.of("unload_model", body)
        if (known := self.promises.repeated(f"{model_id}/unload", sent)) is not None:
            return known
        trained = self._client(body)
        trained.sequencer.close()
        del self.clients[model_id]

        async def gone() -> Result:
            return {"type": "unload_model", "model_id": model_id}

        promise = self.promises.make(f"{model_id}/unload", trained.session, sent, work=gone)
        self.journal.end_client(model_id)
        return promise.acknowledgement

    def forward_backward(self, asked: ForwardBackward, *, limited: bool = True) -> dict[str, Any]:
        """Queue a request; unless `limited`, it may wait however many bytes of others wait."""
        trained = self._client({"model_id": asked.model_id})
        kind = "forward" if asked.forward_only else "forward_backward"

        def score() -> bytes:
            assert trained.learner is not None, "the client was made"
            loss, config = self._loss(asked)
            run = trained.learner.forward if asked.forward_only else trained.learner.forward_backward
            try:
                scored = run(asked.data, loss, config)
            except Exception as error:
                if is_out_of_memory(error):
                    raise MemoryError(
                        f"{kind} of {len(asked.data)} datums ran out of memory at {self.base.token_budget:,} tokens at"
                        f" once; start the server with --token-budget {self.base.token_budget // 2}."
                    ) from error
                raise
            substituted = asked.loss_fn in self.settings.substitute
            return write_forward_backward(
                scored.logprobs, scored.metrics | ({"substituted:unique": 1.0} if substituted else {})
            )

        tokens = sum(len(datum.tokens) for datum in asked.data)
        size = f"{len(asked.data)} datums, {tokens:,} tokens"
        sent = Sent.of("forward_backward", request_of(asked))
        number = _number({"seq_id": asked.seq_id})
        return self._queue(trained, number, sent, kind, score, size, limited=limited)

    def _loss(self, asked: ForwardBackward) -> tuple[Loss, dict[str, float]]:
        return loss_of(self.settings.substitute.get(asked.loss_fn, asked.loss_fn), asked.config)

    def optim_step(self, body: Body) -> dict[str, Any]:
        trained = self._client(body)
        step = partial(self._step, trained, body)
        return self._queue(trained, _number(body), Sent.of("optim_step", body), "optim_step", step)

    def _step(self, trained: Trained, body: Body) -> dict[str, Any]:
        """Take a step of the optimizer, unless a request before it failed."""
        assert trained.learner is not None, "the client was made"
        if trained.broken is not None:
            broken, trained.broken = trained.broken, None
            trained.learner.forget()
            raise Refusal(f"optim_step was not run: {broken} Its gradients were dropped.")
        return {"metrics": trained.learner.step(requests.adam_params(body))}

    def _new_client(self, session: Session, run: TrainingRun, number: int) -> Trained:
        if len(self.clients) >= self.settings.max_clients:
            raise Refusal(
                f"{len(self.clients)} training clients are open, which is this server's limit. End a program, or start"
                f" the server with --max-clients {2 * self.settings.max_clients}."
            )
        return self._add_client(session, run, number)

    def _add_client(self, session: Session, run: TrainingRun, number: int) -> Trained:
        sequencer = Sequencer(self.promises, patience=self.settings.patience)
        trained = Trained(run, session.id, number, sequencer, seen=time.monotonic())
        sequencer.on_end = lambda number, kind, failure: self._ended(trained, number, kind, failure)
        sequencer.next = 0  # the operation that makes it
        self.clients[run.id] = trained
        session.clients.append(run.id)
        return trained

    def _ended(self, trained: Trained, number: int, kind: str, failure: Exception | None) -> None:
        if failure is None:
            return
        self._log(f"{trained.run.id} {kind} {number} failed: {failure}")
        if kind == "forward_backward":
            _break(trained, number, str(failure))
        if kind == "create_model":
            self.clients.pop(trained.run.id, None)

    def _client(self, body: Body) -> Trained:
        model_id = value_of(body, "model_id", str)
        if model_id not in self.clients:
            raise Refusal(self._unknown("model", model_id), 404)
        trained = self.clients[model_id]
        self._known_session(trained.session)
        return trained

    def _queue(
        self,
        trained: Trained,
        number: int,
        sent: Sent,
        kind: str,
        job: Callable[[], Any],
        size: str = "",
        then: Callable[[Any], Result] = lambda result: result,
        limited: bool = False,
    ) -> dict[str, Any]:
        """Queue an operation by its number; one that was sent before is not run again.

        `job` computes, on the worker's thread; `then` makes the answer of what it returned, on the event loop. A
        `limited` operation is refused with 429, after which clients send it again, where too many bytes wait.
        """
        request_id = f"{trained.run.id}/{number}"
        if (known := self.promises.repeated(request_id, sent)) is not None:
            return known
        waiting = self._training_bytes
        if limited and number != trained.sequencer.next and waiting + len(sent.body) > self.settings.max_waiting_bytes:
            raise Refusal(f"training requests of {waiting:,} bytes wait here already.", 429)
        asked = time.monotonic()

        def run() -> tuple[Any, ClientEntry | None]:
            before = trained.learner, trained.saved_at, trained.broken
            result = job()
            if kind not in CHANGING:
                return result, None
            try:
                return result, self._kept(trained, number, kind)
            except Exception:
                trained.learner, trained.saved_at, trained.broken = before  # the answer says that it failed
                raise

        async def work() -> Result:
            began = time.monotonic()
            computed, kept = await asyncio.wrap_future(self.worker.run(run))
            result = then(computed)
            if kept is not None:
                self.journal.advance(request_id, result, kept)
                if self.clients.get(trained.run.id) is not trained:  # it was unloaded, or its session ended, meanwhile
                    self.journal.end_client(trained.run.id)
            took = time.monotonic() - began
            self._log(f"{trained.run.id} {kind} {number}: {size or 'done'}, {took:.2f} s after {began - asked:.2f} s")
            return result

        promise = self.promises.make(request_id, trained.session, sent, client=trained.run.id, number=number)
        try:
            trained.sequencer.add(number, Operation(kind, work, promise))
        except Refusal:
            self.promises.discard(request_id)
            raise
        self._training_bytes += len(sent.body)
        promise.result.add_done_callback(lambda result: self._has_run(len(sent.body)))
        return promise.acknowledgement

    def _has_run(self, size: int) -> None:
        self._training_bytes -= size

    # ---- sessions of an earlier server -------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Continue the sessions and requests of a server that was killed; Refusal if its files cannot be read."""
        past = self.journal.past()
        for session_id, version in past.sessions:
            self.sessions[session_id] = Session(session_id, version, time.monotonic())
        for client in past.clients:
            if client.session not in self.sessions:
                continue  # it ended while an operation ran
            await self._restore_client(client, [one for one in past.requests if one.client == client.run.id])
        for sampler in past.samplers:
            if sampler.session in self.sessions:
                await self._restore_sampler(sampler)
        for entry in past.requests:
            if entry.outcome is None:
                self._accept_again(entry)
            elif not entry.dropped:
                self.promises.restore(entry)
        if past.sessions:
            waiting = sum(entry.outcome is None for entry in past.requests)
            sessions, clients = len(past.sessions), len(past.clients)
            self._say(f"continues {sessions} sessions, {clients} training clients and {waiting} requests")

    async def _restore_client(self, client: ClientEntry, entries: list[RequestEntry]) -> None:
        """Restore a client: load its newest weights, and run its later operations again."""
        trained = self._add_client(self.sessions[client.session], client.run, client.number)
        trained.saved_at = client.saved_at
        ended = [entry for entry in entries if entry.outcome is not None]
        trained.sequencer.next = 1 + max([client.through, *(entry.number for entry in ended)])
        since = sorted((entry for entry in ended if entry.number > client.through), key=lambda entry: entry.number)
        await asyncio.wrap_future(self.worker.run(partial(self._repeat, trained, client.weights, since)))

    def _repeat(self, trained: Trained, weights: str, entries: Iterable[RequestEntry]) -> None:
        """Load weights, and run operations that were run after them. Their results are known already."""
        tensors = self.journal.read(weights)
        trained.learner = learner = Learner(self.base, adapter_of(self.base.model, trained.run.spec, tensors))
        load_moments(learner, tensors)
        for entry in entries:
            if entry.sent.route == "optim_step" and entry.outcome != NOT_RUN:
                with suppress(Refusal, FloatingPointError):  # as before
                    self._step(trained, json.loads(entry.sent.body))
            elif entry.sent.route == "forward_backward":
                asked = read_forward_backward(entry.sent.body)
                if asked.forward_only:
                    continue
                if entry.outcome == DONE:
                    try:
                        learner.forward_backward(asked.data, *self._loss(asked))
                    except Exception as error:  # memory, say
                        raise Refusal(
                            f"{trained.run.id} cannot repeat operation {entry.number} ({format_error(error)}). Start"
                            " the server as before, or with a smaller --token-budget."
                        ) from error
                else:
                    assert isinstance(entry.result, dict), "a failure is an object with a text"
                    _break(trained, entry.number, entry.result["error"])

    async def _restore_sampler(self, entry: SamplerEntry) -> None:
        sampler = Sampler(entry.id, entry.session, entry.number, entry.path, client=entry.client, gone=entry.gone)
        if entry.snapshot is not None and entry.gone is None:
            sampler.snapshot = self._snapshots.get(entry.snapshot)
            if sampler.snapshot is None:
                read = partial(self.journal.read, snapshot_file(entry.id))
                low_rank = _paired(await asyncio.wrap_future(self.worker.run(read)), self.base)
                sampler.snapshot = self._snapshots.setdefault(entry.snapshot, WeightSnapshot(entry.snapshot, low_rank))
        self.samplers[entry.id] = sampler
        self.sessions[entry.session].samplers.append(entry.id)
        if entry.client in self.clients and entry.gone is None:
            self.clients[entry.client].samplers.append(entry.id)

    def _accept_again(self, entry: RequestEntry) -> None:
        """Accept an earlier server's request that has no result; one that is refused now fails."""
        try:
            if entry.sent.route == "forward_backward":
                self.forward_backward(read_forward_backward(entry.sent.body), limited=False)  # it was accepted
            else:
                getattr(self, entry.sent.route)(json.loads(entry.sent.body))
        except Refusal as error:
            more = {name: value for name, value in entry.acknowledgement.items() if name != "request_id"}
            promise = self.promises.make(
                entry.id, entry.session, entry.sent, client=entry.client, number=entry.number, **more
            )
            self.promises.settle(promise, failed(str(error), "user"), FAILED)

    def _kept(self, trained: Trained, number: int, kind: str) -> ClientEntry | None:
        """Write a client's weights after an operation; None where none are due or kept."""
        learner = trained.learner
        assert learner is not None, "the client was made"
        if kind == "optim_step" and not self.journal.is_due(learner.steps):
            return None
        try:
            file = self.journal.weights(trained.run.id, number, lambda: learner.adapter.saved() | moments_of(learner))
        except OSError as error:
            if kind != "optim_step":  # which can be run again
                raise
            self._log(f"the state of {trained.run.id} could not be written: {error}")
            return None
        if file is None:
            return None
        return ClientEntry(trained.run, trained.session, trained.number, trained.saved_at, number, file)

    # ---- saved states ------------------------------------------------------------------------------------------------

    def save_weights(self, body: Body) -> dict[str, Any]:
        return self._save("save_weights", body, "weights")

    def save_weights_external(self, body: Body) -> dict[str, Any]:
        if body.get("age_encryption_recipients"):
            raise Refusal("age_encryption_recipients: files are not encrypted here. Leave it out.")
        return self._save("save_weights_external", body, "external_weights")

    def save_weights_for_sampler(self, body: Body) -> dict[str, Any]:
        trained = self._client(body)
        if body.get("path") is not None:
            return self._save("save_weights_for_sampler", body, "sampler_weights")
        if (kind := value_of(body, "kind", str, "snapshot")) not in ("snapshot", "inflight"):
            raise Refusal(f"kind={kind!r} is not known; it is snapshot or inflight.")
        session = self.sessions[trained.session]
        number = value_of(body, "sampling_session_seq_id", int, least=0)
        sampler_id = f"{session.id}:sample:{number}"

        def freeze() -> WeightSnapshot:
            assert trained.learner is not None, "the client was made"
            frozen = trained.learner.adapter.frozen()
            self.journal.snapshot(sampler_id, lambda: _flat(frozen))
            return WeightSnapshot(sampler_id, frozen)

        def keep(snapshot: WeightSnapshot) -> dict[str, Any]:
            if self.sessions.get(session.id) is not session:
                raise Refusal("its session has ended.", 410)
            made = Sampler(sampler_id, session.id, number, snapshot=snapshot, client=trained.run.id)
            self._add_sampler(session, made)
            trained.samplers.append(sampler_id)
            for old in trained.samplers[:-KEPT_SAMPLERS]:
                self._drop_sampler(old, f"only the newest {KEPT_SAMPLERS} unnamed samplers of a client are kept")
            del trained.samplers[:-KEPT_SAMPLERS]
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        sent = Sent.of("save_weights_for_sampler", body)
        return self._queue(trained, _number(body), sent, "save_weights_for_sampler", freeze, then=keep)

    def _save(self, route: str, body: Body, kind: str) -> dict[str, Any]:
        trained, number = self._client(body), _number(body)
        name = value_of(body, "path", str, f"{number:06d}")
        options = {
            "ttl": lifetime(body),
            "overwrite": value_of(body, "overwrite", bool, False),
            "user_metadata": _check_metadata(body) if body.get("user_metadata") is not None else None,
            "operation": f"{trained.run.id}/{number}",
        }

        def noted(result: dict[str, Any]) -> dict[str, Any]:
            self.journal.saved(trained.run.id, trained.saved_at)
            return result

        job = self._save_job(trained, kind, name, options)
        return self._queue(trained, number, Sent.of(route, body), f"save {kind}", job, then=noted)

    def _save_job(
        self, trained: Trained, kind: str, name: str, options: dict[str, Any]
    ) -> Callable[[], dict[str, Any]]:
        def save() -> dict[str, Any]:
            assert trained.learner is not None, "the client was made"
            path = self.store.save(trained.run, kind, checked_name(name), trained.learner, **options)
            if kind == "weights":
                trained.saved_at = trained.learner.steps
            return {"path": path}

        return save

    def training_run(self, run_id: str) -> dict[str, Any]:
        return self._described(self.store.run(run_id))

    def training_runs(self, query: Mapping[str, str]) -> dict[str, Any]:
        runs = [self._described(run) for run in self.store.runs()]
        page, cursor = _page(runs, query)
        return {"training_runs": page, "cursor": cursor}

    def checkpoints(self, run_id: str | None, query: Mapping[str, str]) -> dict[str, Any]:
        page, cursor = _page([_listed(one) for one in self.store.list(run_id)], query)
        return {"checkpoints": page, "cursor": cursor}

    def delete_checkpoint(self, run_id: str, checkpoint: str) -> dict[str, Any]:
        self.store.delete(f"tinker://{run_id}/{checkpoint}")
        return {}

    def keep_checkpoint(self, run_id: str, checkpoint: str, body: Body) -> dict[str, Any]:
        self.store.keep(f"tinker://{run_id}/{checkpoint}", lifetime(body))
        return {}

    def weights_info(self, body: Body) -> dict[str, Any]:
        run, _ = self.store.find(value_of(body, "tinker_path", str))
        spec = run.spec
        switches = {name: getattr(spec, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": run.base_model, "is_lora": True, "lora_rank": spec.rank, **switches}

    def download(self, run_id: str, checkpoint: str, origin: str) -> dict[str, Any]:
        """Addresses of a checkpoint's files that need no key, for an hour."""
        _, place = self.store.find(f"tinker://{run_id}/{checkpoint}")
        now = time.time()
        self.downloads = {key: entry for key, entry in self.downloads.items() if entry[1] > now}
        key = secrets.token_urlsafe(24)
        self.downloads[key] = place, now + 3600
        files = ("adapter_model.safetensors", "adapter_config.json")
        urls = {name: f"{origin}/download/{key}/{name}" for name in files}
        return {"urls": urls, "expires": _time(now + 3600)}

    def _described(self, run: TrainingRun) -> dict[str, Any]:
        return {
            "training_run_id": run.id,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run.spec.rank,
            "last_request_time": _time(run.created),
            "user_metadata": {key: str(value) for key, value in run.user_metadata.items()},
        }

    # ---- samplers ----------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, body: Body) -> dict[str, Any]:
        session = self._session(body)
        number = value_of(body, "sampling_session_seq_id", int, least=0)
        sampler_id, path = f"{session.id}:sample:{number}", value_of(body, "model_path", str, None)
        if path is None:
            self._served(value_of(body, "base_model", str))
        if sampler_id not in self.samplers:
            snapshot = None if path is None else await self._snapshot_of(path)
            if snapshot is not None:
                flat = partial(_flat, snapshot.low_rank)
                await asyncio.wrap_future(self.worker.run(partial(self.journal.snapshot, sampler_id, flat)))
            self._known_session(session.id)  # it may have ended meanwhile
            if sampler_id not in self.samplers:  # a repeated request may have been faster
                self._add_sampler(session, Sampler(sampler_id, session.id, number, path, snapshot))
        if (self.samplers[sampler_id].path, self.samplers[sampler_id].client) != (path, None):
            raise Refusal(f"{sampler_id!r} is another sampler: two programs use one session. Let each create its own.")
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _add_sampler(self, session: Session, sampler: Sampler) -> None:
        self.samplers[sampler.id] = sampler
        session.samplers.append(sampler.id)
        self.journal.sampler(_noted(sampler))

    def sampler(self, sampler_id: str) -> dict[str, Any]:
        sampler = self._sampler(sampler_id)
        return {"sampler_id": sampler.id, "base_model": self.settings.names[0], "model_path": sampler.path}

    def asample(self, body: Body) -> dict[str, Any]:
        sampler = self._sampler(value_of(body, "sampling_session_id", str))
        self._known_session(sampler.session)
        number, sent = _number(body), Sent.of("asample", body)
        request_id = f"{sampler.id}/{number}"
        if (known := self.promises.repeated(request_id, sent)) is not None:
            return known
        if sampler.gone is not None:
            raise Refusal(f"the sampler {sampler.id!r} has gone: {sampler.gone}. Save the weights again.", 410)
        if self._sampling >= self.settings.max_waiting:
            raise Refusal(f"{self._sampling} requests wait here already.", 429)
        asked = requests.sample_asked(body, self.base.most_tokens, self.base.vocabulary, self._ends, MOST_SAMPLES)
        request = engine_request(asked, (self.settings.seed, sampler.number, number))
        snapshot = sampler.snapshot

        async def sample() -> Result:
            began = time.monotonic()
            self._sampling += 1
            try:
                completions = await asyncio.wrap_future(self.worker.sample(snapshot, request))
                if scores_prompt(asked) or asked.top_sampled:
                    job = lambda: answered(self.base, snapshot, asked, completions)  # noqa: E731
                    answer = await asyncio.wrap_future(self.worker.run(job))
                else:
                    answer = answered(self.base, snapshot, asked, completions)
            finally:
                self._sampling -= 1
            tokens = sum(len(one.token_ids) for one in completions)
            self._log(f"{sampler.id} sample {number}: {asked.n} x {tokens:,} tokens, {time.monotonic() - began:.2f} s")
            return write_sampled(answer)

        ids = [f"{request_id}/{one}" for one in range(asked.n)]
        promise = self.promises.make(
            request_id, sampler.session, sent, number=number, work=sample, sample_sequence_ids=ids
        )
        return promise.acknowledgement

    async def _snapshot_of(self, path: str) -> WeightSnapshot:
        """The weights of a checkpoint; samplers of one state share them, but not of one that replaced it."""

        def found() -> tuple[str, TrainingRun, Path]:
            run, place = self.store.find(path)
            return f"{path}@{self.store.created(place)}", run, place

        def load() -> WeightSnapshot:
            name, run, place = found()  # again: the job may come after one that saves
            return WeightSnapshot(name, self.store.adapter(run, place, self.base.model).frozen())

        if (known := self._snapshots.get(found()[0])) is not None:
            return known
        loaded = await asyncio.wrap_future(self.worker.run(load))
        return self._snapshots.setdefault(loaded.name, loaded)

    def _sampler(self, sampler_id: str) -> Sampler:
        if sampler_id not in self.samplers:
            raise Refusal(self._unknown("sampler", sampler_id), 404)
        return self.samplers[sampler_id]

    def _drop_sampler(self, sampler_id: str, why: str = "its session has ended") -> None:
        sampler = self.samplers.get(sampler_id)
        if sampler is None:
            return
        sampler.snapshot, sampler.gone = None, why
        self.journal.sampler(_noted(sampler))

    # ---- promises and the server -------------------------------------------------------------------------------------

    async def retrieve_future(self, body: Body, seconds: float) -> Result | None:
        """A result, or None if it is not there in time; Refusal for an unknown one."""
        request_id = value_of(body, "request_id", str)
        promise = self.promises.get(request_id)
        if promise is None:
            raise Refusal(self._unknown("request", request_id), 404)
        if promise.owner in self.sessions:
            self.sessions[promise.owner].seen = time.monotonic()
        return await self.promises.fetch(request_id, seconds)

    def cancel_future(self, body: Body) -> dict[str, Any]:
        promise = self.promises.get(value_of(body, "request_id", str))
        if promise is not None and promise.cancel is not None:
            promise.cancel()
        return {}

    def capabilities(self) -> dict[str, Any]:
        limit = self.base.most_tokens
        models = [
            {"model_name": name, "max_context_length": limit, "trainable": True, "sampleable": True}
            for name in self.settings.names
        ]
        return {"supported_models": models}

    def _served(self, name: str) -> str:
        if name not in self.settings.names:
            raise Refusal(
                f"no model {name[:200]!r} here; this server has {self.settings.names[0]!r}. Start it with --as"
                f" {name[:200]} if that is what you mean."
            )
        return name


def substitutions(given: list[str]) -> dict[str, str]:
    """Names of losses that are used, by the name that is asked for, from texts `OLD=NEW`; Refusal for unknown names."""
    found = {}
    for text in given:
        old, _, new = text.partition("=")
        if old not in (*LOSSES, HOSTED_ONLY) or new not in LOSSES:
            raise Refusal(f"--substitute {text}: write OLD=NEW, such as {HOSTED_ONLY}=importance_sampling.")
        found[old] = new
    return found


def _check_metadata(body: Body) -> dict[str, Any]:
    given: dict[str, Any] = value_of(body, "user_metadata", dict, {})
    if len(repr(given)) > METADATA:
        raise Refusal(f"user_metadata may have {METADATA:,} characters at most.")
    return given


def _number(body: Body) -> int:
    """The number of an operation, or of a request of samples."""
    number: int = value_of(body, "seq_id", int, least=0)
    return number


def _break(trained: Trained, number: int, why: str) -> None:
    """Note that a forward_backward failed, so that the step after it is not taken."""
    trained.broken = trained.broken or f'forward_backward {number} failed ("{why}").'


def _noted(sampler: Sampler) -> SamplerEntry:
    snapshot = None if sampler.snapshot is None else sampler.snapshot.name
    return SamplerEntry(
        sampler.id, sampler.session, sampler.number, sampler.client, sampler.path, snapshot, sampler.gone
    )


def _flat(low_rank: LowRank) -> dict[str, Tensor]:
    """The matrices of an adapter by their own names."""
    return {f"{name}/{kind}": one for name, pair in low_rank.items() for kind, one in zip("AB", pair, strict=True)}


def _paired(tensors: Mapping[str, Tensor], base: Base) -> LowRank:
    """The opposite of `_flat`, on the model's device."""
    names = [name.removesuffix("/A") for name in tensors if name.endswith("/A")]
    return {name: (tensors[f"{name}/A"].to(base.device), tensors[f"{name}/B"].to(base.device)) for name in names}


def _version(text: str) -> tuple[int, ...]:
    parts = [whole(part) for part in text.split(".")[:2]]
    return tuple(part for part in parts if part is not None) if None not in parts else ()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _listed(one: Checkpoint) -> dict[str, Any]:
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    metadata = None if one.user_metadata is None else {key: str(value) for key, value in one.user_metadata.items()}
    return {
        "checkpoint_id": one.id,
        "checkpoint_type": kinds[one.kind],
        "time": _time(one.created),
        "tinker_path": one.path,
        "size_bytes": one.size,
        "public": False,
        "user_metadata": metadata,
        "expires_at": None if one.expires is None else _time(one.expires),
    }


def _page(items: list[Any], query: Mapping[str, str]) -> tuple[list[Any], dict[str, int]]:
    offset, limit = (
        default if (given := whole(query.get(name, ""))) is None else given
        for name, default in (("offset", 0), ("limit", 100))
    )
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}
