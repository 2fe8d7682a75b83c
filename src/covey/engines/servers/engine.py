"""Samples from inference servers, and brings them the policy's weights.

All HTTP runs in one background thread; `generate` may be awaited from any loop, `load_weights` is called from any
thread, also while completions are being sampled. What a make of server calls things is its `ServerApi`'s; how weights
travel is a `WeightTransport`'s; which server gets a request is the `ServerPool`'s; which weights servers hold is
`ServerWeights`'.
"""

import asyncio
import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from covey.core.engine import EngineTraits, SampleRequest
from covey.core.rollout import Completion
from covey.core.weights import WeightUpdate
from covey.engines.servers.errors import BadAnswer, DeadlineExceeded
from covey.engines.servers.handshake import arrive
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.partial_completion import PartialCompletion, check_answer, one_of
from covey.engines.servers.protocols import SampledChunk, ServerApi, WeightTransport
from covey.engines.servers.server_pool import QUICK_SECONDS, PoolMember, ServerPool
from covey.engines.servers.sleep import SleepMode
from covey.engines.servers.weights.versions import ServerWeights
from covey.runtime.loop_thread import LoopThread

EMPTY_ABORTS = 10
"""How often in a row a server may break a completion off without having sampled a token."""


class RemoteEngine:
    """A `RolloutEngine` over one or several servers.

    Args:
        servers: each holds the whole model.
        dialect: how they are spoken to.
        transport: how weights reach them. Needed in every process, since it knows under which name they are sampled
            from; only the process that calls `load_weights` sends any.
        ends: tokens that end a completion.
        vocab_size: of the model that is trained; None: not compared.
        max_context: tokens that model can attend to; None: the servers' alone counts.
        model_name: of the model that is trained, to compare with the servers'.
        timeout: seconds to wait for servers to be up, at the start and when all have failed.
        request_timeout: seconds one request may take.
        sync_timeout: seconds a weight update may take in all.
        concurrency: most completions in flight at one server.
        resend: a server that comes back between two updates is sent the last one again, from the background thread:
            only if that takes no other process and the policy does not change meanwhile.
        sleeps: servers release their memory outside `awake`; for a process that has them to itself.

    Raises:
        ServerRefused: a server is not one that this run can sample from.
        NoServerLeft: a server is not up in time.
    """

    def __init__(
        self,
        servers: Sequence[ServerClient],
        dialect: ServerApi,
        transport: WeightTransport,
        *,
        ends: frozenset[int],
        vocab_size: int | None = None,
        max_context: int | None = None,
        model_name: str | None = None,
        timeout: float = 240.0,
        request_timeout: float = 800.0,
        sync_timeout: float = 600.0,
        concurrency: int = 512,
        resend: bool = False,
        sleeps: bool = False,
    ):
        self.dialect = dialect
        self.transport = transport
        self._ends = ends
        self._vocab_size = vocab_size
        self._request_timeout = request_timeout
        self._sync_timeout = sync_timeout
        self._sleeps = sleeps
        self._awake = 0
        self._thread = LoopThread("covey-servers")
        weakref.finalize(self, _give_back, self._thread, list(servers), transport)  # when the program ends, as well
        try:
            self._fleet = self._thread.run(self._start(servers, timeout, concurrency, model_name, resend))
        except BaseException:
            self._thread.run(_close_all(servers), QUICK_SECONDS)
            self._thread.close(seconds=10.0)
            raise
        facts = [member.facts for member in self._fleet.members]
        self._max_context = _smallest([max_context, *(fact.max_context for fact in facts)])
        if max_context is not None and self._max_context is not None and self._max_context < max_context:
            warnings.warn(
                f"the servers attend to {self._max_context} tokens and the model to {max_context}: prompt and"
                f" completion end at {self._max_context}. If that is too short, start them with a longer context"
                f" ({dialect.settings.context}).",
                stacklevel=2,
            )
        self.traits = EngineTraits(
            expands_images=True,
            updates_in_flight=True,
            reports_after_cut=any(fact.reports_after_cut for fact in facts),
            takes_adapters=all(fact.takes_adapters for fact in facts),
            dtype=min((fact.dtype for fact in facts if fact.dtype), key=lambda dtype: dtype.itemsize, default=None),
        )

    async def _start(
        self, servers: Sequence[ServerClient], timeout: float, concurrency: int, model_name: str | None, resend: bool
    ) -> ServerPool:
        dialect = self.dialect
        members = await arrive(dialect, servers, timeout, vocab_size=self._vocab_size, model_name=model_name)

        async def readmit(member: PoolMember) -> bool:
            weights = to_readmit()
            return weights is not None and await weights.readmit(member)

        fleet = ServerPool(
            members,
            alive=dialect.alive,
            readmit=readmit,
            concurrency=concurrency,
            timeout=timeout,
            timeout_setting=dialect.settings.timeout,
        )
        self._sleep = SleepMode(fleet, dialect, self._sleeps, self._sync_timeout)
        self._weights = ServerWeights(
            fleet, dialect, self.transport, self._sleep, timeout=self._sync_timeout, resend=resend
        )
        to_readmit = weakref.ref(self._weights)  # what looks after servers keeps neither the engine nor its weights
        return fleet

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt; drafts are not made use of.

        Raises:
            ServerRefused: a server said no.
            ServerError: answers could not be used, several times.
            NoServerLeft: all servers failed and none came back.
        """
        return await asyncio.wrap_future(self._thread.start(self._generate(request)))

    async def _generate(self, request: SampleRequest) -> list[Completion]:
        params = replace(request.params, max_tokens=request.token_budget(self._max_context))
        request = replace(request, params=params, drafts=None, draft_logprobs=None)
        answer, version = await self._ask(request)
        return list(
            await asyncio.gather(
                *(self._finish(one_of(request, i), sampled, version) for i, sampled in enumerate(answer))
            )
        )

    async def _ask(self, request: SampleRequest) -> tuple[list[SampledChunk], int | None]:
        """The answer, and the version of the weights that all of its tokens were sampled with.

        A pause breaks off whatever is being sampled, so what comes back whole was sampled with one version: the one at
        its start, or, where another process sent new weights before the server had begun, the one at its end.
        """

        async def call(member: PoolMember) -> tuple[list[SampledChunk], int | None]:
            version = member.version
            model = self.transport.model_name(member.facts, version or 0)
            try:
                answer = await self.dialect.generate(
                    member.server, request, model=model, ends=self._ends, deadline=self._request_timeout
                )
            except DeadlineExceeded as error:
                raise DeadlineExceeded.of(self.dialect.settings.request_timeout, error) from error
            check_answer(member.url, request, answer, self._ends, self._vocab_size)
            if any(sampled.aborted for sampled in answer):
                await self._weights.wait_for_news(version)
            elif model == member.facts.model:  # an adapter is of one version for ever
                version = member.version
            return answer, version

        return await self._fleet.run(call, load=request.n)

    async def _finish(self, request: SampleRequest, sampled: SampledChunk, version: int | None) -> Completion:
        """Continue a completion that new weights broke off, with what there is of it as part of the prompt."""
        progress = PartialCompletion(request)
        progress.add(sampled, version)
        empty = 0
        while sampled.aborted and not progress.complete(self._ends):
            empty = 0 if sampled.completion.token_ids else empty + 1
            if empty > EMPTY_ABORTS:
                raise BadAnswer("the server", "generate", f"it broke a completion off {empty} times in a row")
            [sampled], version = await self._ask(progress.rest())
            progress.add(sampled, version)
        return progress.completion(sampled.completion.finish if not sampled.aborted else progress.end(self._ends))

    # ---- weights ---------------------------------------------------------------------------------------------------

    def load_weights(self, update: WeightUpdate) -> None:
        """Bring every server that lives to `update`; completions under way are continued with the new weights.

        A server that fails is left out, the others go on. Where all have failed, one that comes back in time will do.

        Raises:
            ServerError: it failed although servers live; with the version, the tensor and the server's words.
            NoServerLeft: no server lives, or comes back in time.
        """
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        most = self._sync_timeout + 4 * QUICK_SECONDS  # what is begun in time may end a little later
        try:
            self._thread.run(self._weights.load(update, device), most)
        except TimeoutError as error:
            urls = ", ".join(member.url for member in self._fleet.members)
            doing = f"send weights of version {update.version}"
            late = DeadlineExceeded(urls, doing, f"not done within {most:g} seconds")
            raise DeadlineExceeded.of(self.dialect.settings.sync_timeout, late) from error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within this context requests wait instead of starting: another process changes the weights."""
        hold = self._fleet.held()

        async def begin() -> None:
            hold.__enter__()

        async def end() -> None:
            hold.__exit__(None, None, None)

        self._thread.run(begin(), QUICK_SECONDS)
        try:
            yield
        finally:
            self._thread.run(end(), QUICK_SECONDS)

    def tell(self) -> Any:
        """After `load_weights`: what the `adopt` of other processes must know; JSON."""
        return {"urls": self.holders, "transport": self.transport.tell()}

    def learn(self, version: int, told: Any) -> None:
        """`adopt` what another process has sent, with all that its `tell` said."""
        self.transport.learn(told["transport"])
        self.adopt(version, told["urls"])

    def adopt(self, version: int, urls: Sequence[str] | None = None) -> None:
        """Learn that the servers hold `version`, which another process has sent.

        Args:
            version: of the weights.
            urls: the servers that have it; None: all that are up.
        """
        self._thread.run(self._weights.adopt(version, urls), QUICK_SECONDS)

    @property
    def version(self) -> int | None:
        """Of the weights that completions are sampled with; None before any were sent."""
        return self._weights.version

    @property
    def holders(self) -> list[str]:
        """URLs of the servers that have the current version, for the `adopt` of other processes."""
        return self._weights.holders

    # ---- sleeping and ending ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Within this context the servers have their memory, and those that lost the current weights are left out.

        Raises:
            ServerRefused: another run sent weights to a server, so what was sampled meanwhile may come from those.
        """
        self._thread.run(self._get_up())
        self._awake += 1
        try:
            yield
            self._thread.run(self._look_back())
        finally:
            self._awake -= 1
            if self._sleeps and not self._awake:
                self._thread.run(self._lie_down())

    async def _get_up(self) -> None:
        async with self._weights.changing:
            await self._sleep.wake()
            await self._weights.recheck()

    async def _look_back(self) -> None:
        """Nobody else may have changed the weights while they were sampled from."""
        if self._weights.sends:
            async with self._weights.changing:
                await self._weights.recheck()

    async def _lie_down(self) -> None:
        async with self._weights.changing:
            await self._sleep.lie_down()

    def close(self) -> None:
        """Give connections, groups and the thread back; completions under way are lost."""
        if self._thread.running:
            try:
                self._thread.run(self._close(), 2 * QUICK_SECONDS)
            finally:
                self._thread.close(seconds=10.0)

    async def _close(self) -> None:
        self._fleet.close()
        await _let_go([member.server for member in self._fleet.members], self.transport)


def _give_back(thread: LoopThread, servers: Sequence[ServerClient], transport: WeightTransport) -> None:
    """`close` for an engine that nobody closed."""
    if thread.running and not thread.is_current_thread():
        with contextlib.suppress(Exception):
            thread.run(_let_go(servers, transport), QUICK_SECONDS)
    thread.close(seconds=10.0)


async def _let_go(servers: Sequence[ServerClient], transport: WeightTransport) -> None:
    await transport.close()
    await _close_all(servers)


async def _close_all(servers: Sequence[ServerClient]) -> None:
    for server in servers:
        await server.close()


def _smallest(numbers: Sequence[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)
