"""Samples from inference servers, and brings them the policy's weights.

All HTTP runs in one background thread; `generate` may be awaited from any loop, `load_weights` is called from any
thread, also while completions are being sampled. What a make of server calls things is its `Dialect`'s; how weights
travel is a `WeightTransport`'s; which server gets a request is the `Fleet`'s.
"""

import asyncio
import contextlib
import time
import uuid
import warnings
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from covey.core.rollout import Completion
from covey.core.weights import WeightUpdate
from covey.rollout.engine import EngineTraits, SampleRequest
from covey.rollout.engines.remote.answers import Progress, check_answer, one_of
from covey.rollout.engines.remote.background import BackgroundLoop
from covey.rollout.engines.remote.dialect import Dialect, Sampled, ServerFacts, WeightTransport
from covey.rollout.engines.remote.errors import (
    RETRIED,
    BadAnswer,
    DeadlineExceeded,
    GroupNotJoined,
    NoServerLeft,
    ServerBusy,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from covey.rollout.engines.remote.fleet import FIRST_PAUSE, Fleet, Member
from covey.rollout.engines.remote.server import Server
from covey.rollout.engines.requests import budget_of

LOOK_SECONDS = 30.0
"""For a server to say what it is."""

QUICK_SECONDS = 15.0
"""For a server to say that it lives, or to be paused: it may be busy."""

GRACE_SECONDS = 5.0
"""After a pause, for what was in flight to come back."""

SEND_ATTEMPTS = 3
"""How often weights are sent to servers that live and fail at taking them."""

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
        servers: Sequence[Server],
        dialect: Dialect,
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
        self._resend = resend
        self._sleeps = sleeps
        self._asleep = False
        self._awake = 0
        self._run = uuid.uuid4().hex[:8]
        self._version: int | None = None
        self._sends = False
        self._hopeless: dict[Member, ServerError] = {}  # they live and take no weights
        self._latest: WeightUpdate | None = None
        self._thread = BackgroundLoop("covey-servers")
        weakref.finalize(self, _give_back, self._thread, list(servers), transport)  # when the program ends, as well
        try:
            self._fleet = self._thread.run(self._start(servers, timeout, concurrency, model_name))
        except BaseException:
            self._thread.run(_close_all(servers), QUICK_SECONDS)
            self._thread.close()
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
            updates_in_flight=True,
            reports_after_cut=any(fact.reports_after_cut for fact in facts),
            takes_adapters=all(fact.takes_adapters for fact in facts),
            dtype=min((fact.dtype for fact in facts if fact.dtype), key=lambda dtype: dtype.itemsize, default=None),
        )

    # ---- start -----------------------------------------------------------------------------------------------------

    async def _start(
        self, servers: Sequence[Server], timeout: float, concurrency: int, model_name: str | None
    ) -> Fleet:
        self._updating = asyncio.Lock()
        self._news = asyncio.Event()
        found = await asyncio.gather(*(self._first_look(server, timeout) for server in servers))
        lost = {server.url: str(error) for server, error in zip(servers, found, strict=True) if _failed(error)}
        if lost:
            raise NoServerLeft(
                f"{len(lost)} of {len(servers)} {self.dialect.name} servers did not come up within {timeout:g} seconds."
                " Check the addresses and start them; one that loads a large model may need a longer"
                f" {self.dialect.settings.timeout}. What came of asking:",
                lost,
            )
        facts = [fact for fact in found if isinstance(fact, ServerFacts)]
        for server, fact in zip(servers, facts, strict=True):
            self._compare(server, fact, model_name)
            await self.dialect.resume(server, QUICK_SECONDS)  # a run that was killed may have left it paused
        dialect, me = self.dialect, weakref.ref(self)  # what looks after servers does not keep this engine

        async def readmit(member: Member) -> bool:
            engine = me()
            return engine is not None and await engine._readmit(member)

        return Fleet(
            [Member(server, fact) for server, fact in zip(servers, facts, strict=True)],
            alive=lambda member: dialect.alive(member.server, QUICK_SECONDS),
            readmit=readmit,
            concurrency=concurrency,
            timeout=timeout,
            timeout_setting=dialect.settings.timeout,
        )

    async def _first_look(self, server: Server, timeout: float) -> ServerFacts | ServerError:
        """What it is, as soon as it is up; the last failure if it is not in time."""
        until = time.monotonic() + timeout
        while True:
            try:
                return await self.dialect.look(server, min(LOOK_SECONDS, max(1.0, until - time.monotonic())))
            except RETRIED as error:
                if time.monotonic() + FIRST_PAUSE >= until:
                    return error
            await asyncio.sleep(FIRST_PAUSE)

    def _compare(self, server: Server, facts: ServerFacts, model_name: str | None) -> None:
        """The server's model against the one that is trained."""
        if None not in (facts.vocab_size, self._vocab_size) and facts.vocab_size != self._vocab_size:
            raise ServerRefused(
                server.url,
                "sample for this run",
                f"its model ({facts.model}) has {facts.vocab_size} tokens, and the one that is trained has"
                f" {self._vocab_size}",
                "Start the server with the model that is trained.",
            )
        path = facts.path or facts.model
        if model_name and _tail(path) != _tail(model_name):
            warnings.warn(
                f"{server.url} was started with {path!r} and {model_name!r} is trained. Fine if they are one"
                " architecture, since the server is sent the weights; otherwise start it with the model that is"
                " trained.",
                stacklevel=2,
            )

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt; drafts are not made use of.

        Raises:
            ServerRefused: a server said no.
            ServerError: answers could not be used, several times.
            NoServerLeft: all servers failed and none came back.
        """
        return await self._thread.wait_for(self._generate(request))

    async def _generate(self, request: SampleRequest) -> list[Completion]:
        params = replace(request.params, max_tokens=budget_of(request, self._max_context))
        request = replace(request, params=params, drafts=None, draft_logprobs=None)
        answer, version = await self._ask(request)
        return list(
            await asyncio.gather(
                *(self._finish(one_of(request, i), sampled, version) for i, sampled in enumerate(answer))
            )
        )

    async def _ask(self, request: SampleRequest) -> tuple[list[Sampled], int | None]:
        """The answer, and the version of the weights that all of its tokens were sampled with.

        A pause breaks off whatever is being sampled, so what comes back whole was sampled with one version: the one at
        its start, or, where another process sent new weights before the server had begun, the one at its end.
        """

        async def call(member: Member) -> tuple[list[Sampled], int | None]:
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
                await self._wait_for_news(version)
            elif model == member.facts.model:  # an adapter is of one version for ever
                version = member.version
            return answer, version

        return await self._fleet.run(call, load=request.n)

    async def _finish(self, request: SampleRequest, sampled: Sampled, version: int | None) -> Completion:
        """Continue a completion that new weights broke off, with what there is of it as part of the prompt."""
        progress = Progress(request)
        progress.add(sampled, version)
        empty = 0
        while sampled.aborted and not progress.complete(self._ends):
            empty = 0 if sampled.completion.token_ids else empty + 1
            if empty > EMPTY_ABORTS:
                raise BadAnswer("the server", "generate", f"it broke a completion off {empty} times in a row")
            [sampled], version = await self._ask(progress.rest())
            progress.add(sampled, version)
        return progress.completion(sampled.completion.finish if not sampled.aborted else progress.end(self._ends))

    async def _wait_for_news(self, version: int | None) -> None:
        """Where another process sends the weights, an aborted request means that it does so now."""
        if self._sends or version is None or self._version != version:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), self._sync_timeout)

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
            self._thread.run(self._load(update, device), most)
        except TimeoutError as error:
            urls = ", ".join(member.url for member in self._fleet.members)
            doing = f"send weights of version {update.version}"
            late = DeadlineExceeded(urls, doing, f"not done within {most:g} seconds")
            raise DeadlineExceeded.of(self.dialect.settings.sync_timeout, late) from error

    async def _load(self, update: WeightUpdate, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # threads have a device each
        self._sends = True
        until = time.monotonic() + self._sync_timeout
        doing = f"send weights of version {update.version}"
        async with self._updating:
            with self._fleet.held():
                self._latest, self._version = update, update.version
                try:
                    await self._bring(update, until, doing)
                except BaseException as error:
                    for member in self._fleet.up:  # nobody knows what they hold now
                        self._fleet.leave_out(member, error)
                    raise
        self._tell_news()

    async def _bring(self, update: WeightUpdate, until: float, doing: str) -> None:
        """Send until somebody has it; one that lives and fails is tried again by itself, after the others."""
        failures: Counter[Member | None] = Counter()  # None: nobody's in particular
        done = False
        while True:
            reachable = await self._fleet.reachable(until, doing)
            failing = [member for member in reachable if failures[member]]
            members = failing if done else [member for member in reachable if member not in failing] or failing
            if not members:
                return
            try:
                if await self._update(members, update, until, doing):
                    done = True
                    for member in members:
                        del failures[member]
            except ServerRefused:
                raise
            except ServerError as error:
                if not await self._lose(members, error):
                    blamed = next((member for member in members if member.url == error.url), None)
                    failures[blamed] += SEND_ATTEMPTS if isinstance(error, GroupNotJoined) else 1
                    if failures[blamed] >= SEND_ATTEMPTS:
                        others = [m for m in self._fleet.members if m is not blamed and m not in self._hopeless]
                        if blamed is None or not others:
                            raise
                        self._give_up(blamed, error)
                if time.monotonic() >= until:
                    if not done:
                        raise
                    for member in members:
                        if member.up:
                            self._fleet.leave_out(member, error)
                    return

    def _give_up(self, member: Member, error: ServerError) -> None:
        """Send a server no more weights until it has been away, as it is while it is started anew."""
        self._fleet.leave_out(member, error)
        self._hopeless[member] = error
        warnings.warn(
            f"{error} It lives and takes no weights, so the run goes on without it; start it anew to have it back.",
            stacklevel=2,
        )

    async def _update(self, members: list[Member], update: WeightUpdate, until: float, doing: str) -> bool:
        """Pause, send, resume; whether any of `members` has the new weights."""
        for member in members:
            if not member.up:
                self.transport.forget(member.server)
        await self._wake_up(members)
        try:
            members = await self._each(members, self.dialect.pause)
            await self._fleet.drain(members, GRACE_SECONDS)
            if members:
                await self._send(members, update, until, doing)
                members = await self._each(members, self.dialect.forget_prefixes)
                stamp = self._stamp(update.version)
                members = await self._each(
                    members, lambda server, deadline: self.dialect.write_stamp(server, stamp, deadline)
                )
        finally:
            members = await self._each(members, self.dialect.resume)
        for member in members:
            member.version = update.version
            self._fleet.admit(member)
        return bool(members)

    async def _send(self, members: list[Member], update: WeightUpdate, until: float, doing: str) -> None:
        """Have the transport send; a server that dies meanwhile ends it, whatever the transport waits for."""
        left = max(1.0, until - time.monotonic())
        servers = [member.server for member in members]
        with torch.no_grad():
            sending = asyncio.ensure_future(self.transport.send(servers, update, left))
        watching = asyncio.ensure_future(self._fleet.watch(members))
        try:
            await asyncio.wait([sending, watching], timeout=left + 1.0, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return sending.result()
            if watching.done():
                gone = watching.result()
                raise ServerUnreachable(gone.url, doing, f"it died meanwhile ({gone.words or 'it does not answer'})")
            urls = ", ".join(member.url for member in members)
            raise DeadlineExceeded(urls, doing, f"{self.transport.name} took longer than {left:.0f} seconds")
        except GroupNotJoined:
            raise  # that has a limit of its own
        except DeadlineExceeded as error:
            raise DeadlineExceeded.of(self.dialect.settings.sync_timeout, error) from error
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.wait([sending, watching], timeout=GRACE_SECONDS)

    async def _each(
        self,
        members: list[Member],
        do: Callable[[Server, float], Awaitable[None]],
        seconds: float = QUICK_SECONDS,
    ) -> list[Member]:
        """Do something with every member at once; those that fail in a way that may pass are left out."""
        results = await asyncio.gather(*(do(member.server, seconds) for member in members), return_exceptions=True)
        for member, error in zip(members, results, strict=True):
            if isinstance(error, ServerError) and not isinstance(error, ServerRefused):
                self._fleet.leave_out(member, error)
            elif isinstance(error, BaseException):
                raise error
        return [member for member, error in zip(members, results, strict=True) if error is None]

    async def _lose(self, members: list[Member], error: ServerError) -> bool:
        """Leave out whoever is to blame for `error`; whether anybody is."""
        asked = [member for member in members if not member.words]
        for member in await self._each(asked, self.dialect.alive):
            if member.url == error.url and isinstance(error, RETRIED) and not isinstance(error, GroupNotJoined):
                self._fleet.leave_out(member, error)
        return any(member.words for member in asked)

    async def _readmit(self, member: Member) -> bool:
        """Whether a server that was left out may sample: it lives, and holds the current weights."""
        try:
            await self.dialect.alive(member.server, QUICK_SECONDS)
        except (ServerUnreachable, ServerBusy):
            self._hopeless.pop(member, None)
            raise
        if (hopeless := self._hopeless.get(member)) is not None:
            raise ServerError(hopeless.url, hopeless.doing, hopeless.said, "Start it anew to have it back.")
        if self._sleeps and not self._asleep:  # it may have been left out asleep
            await self.dialect.wake(member.server, self._sync_timeout)
        if self._version is None:
            return True
        if member.version == self._version and await self._is_ours(member):
            return True
        update = self._latest
        if not self._resend or update is None or self._updating.locked():
            return False
        async with self._updating:
            member.facts = await self.dialect.look(member.server, LOOK_SECONDS)
            until = time.monotonic() + self._sync_timeout
            try:
                return await self._update([member], update, until, f"send weights of version {update.version}")
            except GroupNotJoined as error:
                self._give_up(member, error)
                raise

    def _stamp(self, version: int) -> str:
        return f"covey-{self._run}-{version}"

    async def _is_ours(self, member: Member) -> bool:
        """Whether the server still holds what it was sent.

        Raises:
            ServerRefused: another run sends it weights.
        """
        stamp = await self.dialect.read_stamp(member.server, QUICK_SECONDS)
        if stamp is None:  # it keeps no notes: believe it unless it may have been started anew
            return member.up
        _, _, rest = stamp.partition("covey-")
        run, _, version = rest.partition("-")
        if run and self._sends and run != self._run:
            raise ServerRefused(
                member.url,
                "sample for this run",
                f"another run has sent it weights (it is stamped {stamp!r})",
                "Give every run servers of its own.",
            )
        return version == str(member.version)

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
        self._thread.run(self._adopt(version, urls), QUICK_SECONDS)

    async def _adopt(self, version: int, urls: Sequence[str] | None) -> None:
        self._version = version
        for member in self._fleet.members:
            if member.url in urls if urls is not None else member.up or member.behind:
                member.version = version
                self._fleet.admit(member)
            elif member.up:
                self._fleet.leave_out(member, "it did not get the latest weights")
        self._tell_news()

    @property
    def version(self) -> int | None:
        """Of the weights that completions are sampled with; None before any were sent."""
        return self._version

    @property
    def holders(self) -> list[str]:
        """URLs of the servers that have the current version, for the `adopt` of other processes."""
        return [member.url for member in self._fleet.members if member.up and member.version == self._version]

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

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
        async with self._updating:
            await self._wake_up()
            if self._version is None:
                return
            await asyncio.gather(*(self._recheck(member) for member in self._fleet.up))

    async def _recheck(self, member: Member) -> None:
        """A server that was started anew since its last answer does not show it otherwise."""
        try:
            if not await self._is_ours(member):
                self._fleet.leave_out(member, "it was started anew and lost the weights it was sent")
        except RETRIED as error:
            self._fleet.leave_out(member, error)

    async def _look_back(self) -> None:
        """Nobody else may have changed the weights while they were sampled from."""
        if self._sends:
            async with self._updating:
                await asyncio.gather(*(self._recheck(member) for member in self._fleet.up))

    async def _wake_up(self, wanted: Sequence[Member] = ()) -> None:
        """Wake who sleeps; among the `wanted`, also those that were left out, who may have been asleep then."""
        lying = self._fleet.up if self._asleep else []
        if self._sleeps:
            lying += [member for member in wanted if not member.up]
        # As long as for new weights: it moves as many bytes.
        await self._each(lying, self.dialect.wake, self._sync_timeout)
        self._asleep = False

    async def _lie_down(self) -> None:
        async with self._updating:
            self._asleep = True
            await self._each(
                self._fleet.up, lambda server, deadline: self.dialect.sleep(server, 1, deadline), self._sync_timeout
            )

    def close(self) -> None:
        """Give connections, groups and the thread back; completions under way are lost."""
        if not self._thread.closed:
            try:
                self._thread.run(self._close(), 2 * QUICK_SECONDS)
            finally:
                self._thread.close()

    async def _close(self) -> None:
        self._fleet.close()
        await _let_go([member.server for member in self._fleet.members], self.transport)


def _give_back(thread: BackgroundLoop, servers: Sequence[Server], transport: WeightTransport) -> None:
    """`close` for an engine that nobody closed."""
    if not thread.closed and not thread.inside:
        with contextlib.suppress(Exception):
            thread.run(_let_go(servers, transport), QUICK_SECONDS)
    thread.close()


async def _let_go(servers: Sequence[Server], transport: WeightTransport) -> None:
    await transport.close()
    await _close_all(servers)


async def _close_all(servers: Sequence[Server]) -> None:
    for server in servers:
        await server.close()


def _failed(found: Any) -> bool:
    return isinstance(found, ServerError)


def _smallest(numbers: Sequence[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _tail(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
