"""Engine over inference servers: samples from them, and sends them the policy's weights.

All HTTP runs in one background thread. `generate` may be awaited in any event loop; `load_weights` may be called from
any thread, also while completions are being sampled.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from covey.core.engine import EngineTraits, SampleRequest, WeightTransfer, WeightUpdate
from covey.core.records import Completion
from covey.engines.servers.completions import PartialCompletion, check_answer
from covey.engines.servers.errors import BadAnswer, DeadlineExceeded
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.pool_file import PoolFile
from covey.engines.servers.protocols import SampledChunk, ServerApi, ServerFacts
from covey.engines.servers.server_pool import QUICK_SECONDS, PoolMember, ServerPool, probe_all
from covey.engines.servers.weights.sender import WeightSender
from covey.engines.servers.weights.versions import ServerWeights
from covey.runtime.loop_thread import LoopThread
from covey.runtime.user_code import warn

EMPTY_ABORTS = 10  # times in a row that a server may abort a completion before it has sampled a token


@dataclass(eq=False)
class RemoteEngine:
    """A `RolloutEngine` over servers that hold the whole model.

    Its creation waits for the servers: ServerRefused if one does not suit the run, NoServerLeft if they are not up in
    time.
    """

    servers: Sequence[ServerClient]
    api: ServerApi  # requests of their backend
    sender: WeightSender  # also gives the names to sample from, in processes that never call `load_weights`
    _: KW_ONLY
    ends: frozenset[int]  # tokens that end a completion
    vocab_size: int | None = None  # of the model that is trained; None: not compared
    max_context: int | None = None  # tokens that model can attend to; None: only the servers' limit counts
    model_name: str | None = None  # of the model that is trained, to compare with the servers'
    timeout: float = 240.0  # seconds to wait for servers to be up, at the start and when all have failed
    request_timeout: float = 800.0  # seconds one request may take
    sync_timeout: float = 600.0  # seconds a whole weight update may take
    concurrency: int = 512  # most completions in flight at one server
    resend: bool = False  # send a server that comes back the last update: if one process sends a constant policy
    sleeps: bool = False  # servers release their memory outside `awake`: only if no other process uses them
    pool_file: PoolFile | None = None  # lists the servers; read again with every `awake`

    def __post_init__(self) -> None:
        self._awake = 0
        self._adapters: dict[str, int] = {}  # version of each adapter that has a name
        self._file_error = ""  # last error of the pool file, of which a warning was given
        self._thread = LoopThread("covey-servers")
        self._end = weakref.finalize(self, _end, self._thread, self.sender)  # at the end of the program as well
        try:
            self._pool = self._thread.run(self._start())
        except BaseException:
            self.close()
            raise
        facts = [member.facts for member in self._pool.members]
        limits = [self.max_context, *(fact.max_context for fact in facts)]
        limit = self._max_context = min((limit for limit in limits if limit is not None), default=None)
        if self.max_context is not None and limit is not None and limit < self.max_context:
            warn(
                f"the servers attend to {limit} tokens and the model to {self.max_context}: prompt and completion end"
                f" at {limit}. If that is too short, start them with a longer context ({self.api.settings.context}).",
            )
        self.traits = EngineTraits(
            expands_images=True,
            updates_in_flight=True,
            reports_after_cut=any(fact.reports_after_cut for fact in facts),
            takes_adapters=all(fact.takes_adapters for fact in facts),
            returns_routes=all(fact.returns_routes for fact in facts),
            dtype=min((fact.dtype for fact in facts if fact.dtype), key=lambda dtype: dtype.itemsize, default=None),
        )

    async def _start(self) -> ServerPool:
        members = await connect(self.api, self.servers, self.timeout, self.model_name)

        async def readmit(member: PoolMember) -> bool:
            weights = weights_ref()
            return weights is not None and await weights.readmit(member)

        pool = ServerPool(members, self.api, readmit, self.concurrency, self.timeout)
        self._weights = ServerWeights(pool, self.api, self.sender, self.sync_timeout, self.resend, self.sleeps)
        weights_ref = weakref.ref(self._weights)  # the pool's tasks must keep neither the engine nor its weights alive
        return pool

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt; drafts are ignored. Errors are those of `ServerPool.run`."""
        return await asyncio.wrap_future(self._thread.start(self._generate(request)))

    async def _generate(self, request: SampleRequest) -> list[Completion]:
        params = replace(request.params, max_tokens=request.token_budget(self._max_context))
        request = replace(request, params=params, drafts=None, draft_logprobs=None)
        answer, version = await self._request(request)
        single = [replace(request, n=1, seeds=[seed]) for seed in request.seeds]
        finished = (self._finish(one, chunk, version) for one, chunk in zip(single, answer, strict=True))
        return list(await asyncio.gather(*finished))

    async def _request(self, request: SampleRequest) -> tuple[list[SampledChunk], int | None]:
        """Answer of a server, and the version of the weights that all tokens in it were sampled with."""

        async def call(member: PoolMember) -> tuple[list[SampledChunk], int | None]:
            version = member.version if request.adapter is None else self._adapters[request.adapter]
            model = self.sender.model_name(member.facts, version or 0)
            try:
                answer = await self.api.generate(
                    member.server, request, model=model, ends=self.ends, deadline=self.request_timeout
                )
            except DeadlineExceeded as error:
                raise DeadlineExceeded.of(self.api.settings.request_timeout, error) from error
            check_answer(member.url, request, answer, self.ends, self.vocab_size)
            if any(chunk.aborted for chunk in answer):
                await self._weights.wait_for_update(version)
            elif model == member.facts.model:  # an adapter has one version
                version = member.version  # a whole answer has one: a pause aborts all that are in flight
            return answer, version

        return await self._pool.run(call, load=request.n)

    async def _finish(self, request: SampleRequest, chunk: SampledChunk, version: int | None) -> Completion:
        """Continue a completion that new weights aborted, or that a token of the server's own choice ended."""
        partial = PartialCompletion(request)
        partial.add(chunk, version)
        empty = 0
        while (chunk.aborted or chunk.unfinished) and not partial.complete(self.ends):
            empty = 0 if chunk.completion.token_ids else empty + 1
            if empty > EMPTY_ABORTS:
                raise BadAnswer("the server", "generate", f"it aborted a completion {empty} times in a row")
            [chunk], version = await self._request(partial.rest())
            partial.add(chunk, version)
        whole = not (chunk.aborted or chunk.unfinished)
        return partial.completion(chunk.completion.finish if whole else partial.finish(self.ends))

    def load_weights(self, update: WeightUpdate) -> WeightTransfer | None:
        """Send `update` to every server that responds; completions in flight are continued with the new weights.

        A server that fails is left out, and the others continue. If all have failed, one that is back in time is
        enough; otherwise `NoServerLeft` is raised, or the `ServerError` of a server that responds. Returns what was
        sent, for servers that accept differences, else None.
        """
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        limit = self.sync_timeout + 4 * QUICK_SECONDS  # requests that began in time may end a little later
        try:
            sent = self._thread.run(self._weights.load(update, device), limit)
        except TimeoutError as error:
            urls = ", ".join(member.url for member in self._pool.members)
            doing = f"send weights of version {update.version}"
            late = DeadlineExceeded(urls, doing, f"not done within {limit:g} seconds")
            raise DeadlineExceeded.of(self.api.settings.sync_timeout, late) from error
        if update.adapter_name is not None:
            self._adapters[update.adapter_name] = update.version
        return sent

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context in which requests wait instead of starting: another process changes the weights."""
        self._thread.run(self._pool.hold(), QUICK_SECONDS)
        try:
            yield
        finally:
            self._thread.run(self._pool.unhold(), QUICK_SECONDS)

    def export_state(self) -> Any:
        """State after `load_weights` for the `import_state` of other processes: servers that hold the version; JSON."""
        version, members = self._weights.version, self._pool.members
        urls = [member.url for member in members if member.up and member.version == version]
        return {"urls": urls, "sender": self.sender.export_state()}

    def import_state(self, version: int, state: Any) -> None:
        """Record that servers hold `version`, which another process has sent."""
        self.sender.import_state(state["sender"])
        self._thread.run(self._weights.adopt(version, state["urls"]), QUICK_SECONDS)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Context in which the servers have their memory, and those that lost the current weights are left out.

        ServerRefused if another run sent a server weights: completions may have been sampled from those.
        """
        self._thread.run(self._change(self._follow_pool_file, self._weights.wake, self._weights.recheck))
        self._awake += 1
        try:
            yield
            if self._weights.sends:
                self._thread.run(self._change(self._weights.recheck))
        finally:
            self._awake -= 1
            if self.sleeps and not self._awake:
                self._thread.run(self._change(self._weights.sleep))

    async def _follow_pool_file(self) -> None:
        """Take servers out of the pool that its file no longer lists, and let new ones join when they are ready."""
        if self.pool_file is None:
            return
        try:
            servers, self._file_error = self.pool_file.servers(), ""
        except ValueError as error:
            if str(error) != self._file_error:
                self._file_error = str(error)
                warn(f"{error} The run continues with its current servers.")
            return
        suits = partial(obstacle_to_join, self.traits, self._max_context)
        joins = partial(warn_of_other_model, model_name=self.model_name)
        for member in self._pool.follow(servers, suits, joins):
            self.sender.forget_server(member.server)

    async def _change(self, *steps: Callable[[], Awaitable[None]]) -> None:
        async with self._weights.changing:
            for step in steps:
                await step()

    def close(self) -> None:
        self._end()


def _end(thread: LoopThread, sender: WeightSender) -> None:
    """Close `sender`, which a connection or a disk that hangs can delay by `QUICK_SECONDS` at most, and the loop."""

    async def close_sender() -> None:
        sender.close()

    try:
        if not thread.is_current_thread():  # collected as garbage there: waiting would be a deadlock
            with contextlib.suppress(Exception):  # of the clean-up: an earlier error is the one to report
                thread.run(close_sender(), QUICK_SECONDS)
    finally:
        thread.close(seconds=10.0)


def obstacle_to_join(traits: EngineTraits, max_context: int | None, facts: ServerFacts) -> str | None:
    """Reason why a server would give other completions than the run's first servers; None if it would not."""
    if traits.takes_adapters and not facts.takes_adapters:
        return "the run's servers take adapters, and it was started without"
    if facts.reports_after_cut and not traits.reports_after_cut:
        return "it reports log-probs after cuts, other than the run's servers: start it with their --logprobs-mode"
    if traits.returns_routes and not facts.returns_routes:
        return (
            "the run's servers return the experts of tokens, and it does not: start it with"
            " --enable-return-routed-experts"
        )
    if max_context is not None and facts.max_context is not None and facts.max_context < max_context:
        return f"it attends to {facts.max_context} tokens, and requests of this run may have {max_context}"
    return None


def warn_of_other_model(server: ServerClient, facts: ServerFacts, model_name: str | None) -> None:
    path = facts.path or facts.model
    if model_name and Path(path).name.lower() != Path(model_name).name.lower():
        warn(
            f"{server.url} was started with {path!r} and {model_name!r} is trained. Fine if they are one"
            " architecture, since the server is sent the weights; otherwise start it with the model that is trained.",
        )


async def connect(
    api: ServerApi, servers: Sequence[ServerClient], timeout: float, model_name: str | None
) -> list[PoolMember]:
    """Wait for all servers to be up, and check that they suit the run, before it begins.

    Raises NoServerLeft if some are not up within `timeout` seconds, ServerRefused if one does not suit.
    """
    found = await probe_all(servers, api.probe, api.name, api.settings, timeout)
    members = []
    for server, facts in zip(servers, found, strict=True):
        warn_of_other_model(server, facts, model_name)
        await api.resume(server, QUICK_SECONDS)  # a run that was killed may have left it paused
        members.append(PoolMember(server, facts))
    return members
