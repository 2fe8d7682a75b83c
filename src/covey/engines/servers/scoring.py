"""Scorer over inference servers: log-probs of given tokens under a served model, such as a teacher.

Servers with the same model share the requests, through a `ServerPool`: a server that fails is left out until it is
back, and the scorer waits if none is left. A server is examined before its first request, and again when it is back.
All HTTP runs in one background thread.
"""

import asyncio
import math
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from statistics import fmean

from covey.core.findings import CheckError, Finding
from covey.engines.servers.errors import DeadlineExceeded, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ScoredToken, ScoreRequest, ScoringApi, ServerFacts
from covey.engines.servers.server_pool import PROBE_SECONDS, PoolMember, ServerPool, probe_all
from covey.engines.servers.sglang.scoring import SglangScoring
from covey.engines.servers.vllm.scoring import VllmScoring
from covey.runtime.loop_thread import LoopThread

BACKENDS: tuple[ScoringApi, ...] = (SglangScoring(), VllmScoring())
PROBED = 256  # most tokens in a request of the examination
FINGERPRINT = 16  # number of log-probs by which a server's model is recognised
SAME_MODEL = 0.1  # largest mean difference, in nats, between fingerprints of one model: rounding in other batches
SAME_TEMPERATURE = 0.02  # largest relative difference between the temperature that was asked for and the measured one
PART = "\ufffd"  # in the text of a token that is a part of a character
SURE = 1e-3  # smallest difference between log-probs, in nats, from which a temperature is measured


@dataclass(frozen=True, slots=True)
class ProbeTokens:
    """Tokens by which vocabularies are compared: spread over all ids, and every special token."""

    ids: list[int]  # in any order
    texts: list[str]  # text of each single token, as the policy's tokenizer decodes it
    last: int  # largest id of the tokenizer
    rows: int  # tokens that the policy has logits for


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of the examination of a server."""

    api: ScoringApi
    facts: ServerFacts
    whole: bool  # it has logits for every id that the policy has logits for
    fingerprint: list[float]  # log-probs of the first probe tokens
    findings: list[Finding]


@dataclass(eq=False)
class ServerScorer:
    """Log-probs of given tokens by servers with one model.

    Its creation waits for the servers: CheckError if one cannot be the teacher, NoServerLeft if some are late.
    """

    servers: Sequence[ServerClient]
    probe: ProbeTokens
    _: KW_ONLY
    name: str  # of the teacher, for messages
    temperature: float = 1.0  # divides the logits
    top: int = 0  # likeliest tokens that are named at each position
    timeout: float = 240.0  # seconds to wait for servers to be up, at the start and when all have failed
    request_timeout: float = 800.0  # seconds one request may take
    concurrency: int = 64  # most requests in flight at one server
    fingerprint: list[float] = field(init=False)
    max_context: int | None = field(init=False)  # longest sequence that every server scores; None: not known
    whole: bool = field(init=False)  # every server has logits for all ids that the policy has logits for

    def __post_init__(self) -> None:
        self._thread = LoopThread("covey-teacher")
        self._end = weakref.finalize(self, self._thread.close, 10.0)
        try:
            self._pool = self._thread.run(self._start())
        except BaseException:
            self.close()
            raise

    async def _start(self) -> ServerPool:
        settings = VllmScoring.settings  # the same for every backend
        try:
            found = await probe_all(self.servers, self._examine, "teacher's", settings, self.timeout)
        except ServerRefused as error:
            raise CheckError.of("teacher-server", f"teacher={self.name!r}: {error}") from error
        if errors := list({one.sentence: one for each in found for one in each.findings}.values()):
            raise CheckError(*errors)
        first = found[0]
        for server, one in zip(self.servers[1:], found[1:], strict=True):
            if one.api is not first.api or distance(one.fingerprint, first.fingerprint) > SAME_MODEL:
                raise CheckError.of(
                    "teacher-server",
                    f"teacher={self.name!r}: {server.url} ({one.api.name}, {one.facts.model!r}) gives other log-probs"
                    f" than {self.servers[0].url} ({first.api.name}, {first.facts.model!r}).",
                    "Servers of one teacher hold one model, on one backend; give several teachers by name.",
                )
        self.fingerprint = first.fingerprint
        limits = [one.facts.max_context for one in found if one.facts.max_context is not None]
        self.max_context, self.whole = min(limits, default=None), all(one.whole for one in found)
        members = [PoolMember(server, one.facts) for server, one in zip(self.servers, found, strict=True)]
        self._api = first.api
        scorer_ref = weakref.ref(self)  # the pool's tasks must not keep the scorer alive

        async def readmit(member: PoolMember) -> bool:
            scorer = scorer_ref()
            return scorer is not None and await scorer._readmit(member)

        return ServerPool(members, first.api, readmit, self.concurrency, self.timeout, doing="score tokens")

    async def _readmit(self, member: PoolMember) -> bool:
        """True if a server that is back can be used again; ServerError if it has another model now."""
        found = await self._examine(member.server, PROBE_SECONDS)
        for finding in found.findings:
            raise ServerError(member.url, "score tokens", finding.sentence)
        if found.api is not self._api or distance(found.fingerprint, self.fingerprint) > SAME_MODEL:
            message = f"it has another model than before ({found.facts.model!r} gives other log-probs)"
            raise ServerError(member.url, "score tokens", message, "Start it with the model that it had.")
        member.facts = found.facts
        return True

    def begin(self, requests: Sequence[ScoreRequest]) -> "Future[list[list[ScoredToken]]]":
        """Start scoring; `wait` returns the answers in the order of the requests."""
        return self._thread.start(self._score_all(requests))

    def wait(self, begun: "Future[list[list[ScoredToken]]]") -> list[list[ScoredToken]]:
        """Scores of what `begin` started. Errors are those of `ServerPool.run`."""
        return self._thread.wait(begun)

    async def _score_all(self, requests: Sequence[ScoreRequest]) -> list[list[ScoredToken]]:
        tasks = [asyncio.create_task(self._score(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # of an error, or where the caller has given up
            for task in tasks:
                task.cancel()

    async def _score(self, request: ScoreRequest) -> list[ScoredToken]:
        async def call(member: PoolMember) -> list[ScoredToken]:
            try:
                return await self._api.score(
                    member.server, request, model=member.facts.model, deadline=self.request_timeout
                )
            except DeadlineExceeded as error:
                raise DeadlineExceeded.of(self._api.settings.request_timeout, error) from error

        return await self._pool.run(call)

    def close(self) -> None:
        self._end()

    # ---- examination -------------------------------------------------------------------------------------------------

    async def _examine(self, server: ServerClient, seconds: float) -> Examined:
        """Properties of a server, with findings if it cannot be the teacher; `ServerError` if it does not respond."""
        api = await backend_of(server, seconds)
        facts = await api.facts(server, seconds)
        unknown = await self._lacks(api, server, facts, self.probe.last, seconds)
        if unknown:
            sentence = f"its model lacks token {self.probe.last}, the last one of the policy's tokenizer ({unknown})."
            finding = Finding.error(
                "teacher-vocabulary",
                f"teacher={self.name!r}: at {server.url} {sentence}",
                "Choose a teacher with the policy's vocabulary.",
            )
            return Examined(api, facts, False, [], [finding])
        whole = self.probe.rows - 1 <= self.probe.last
        whole = whole or not await self._lacks(api, server, facts, self.probe.rows - 1, seconds)
        if self.top and (too_many := await self._check_top(api, server, facts, seconds)) is not None:
            return Examined(api, facts, whole, [], [too_many])
        findings, scored = await self._check_texts(api, server, facts, seconds)
        if self.temperature != 1.0 and not findings:
            findings += await self._check_temperature(api, server, facts, seconds)
        return Examined(api, facts, whole, [one.logprob for one in scored[:FINGERPRINT]], findings)

    async def _lacks(
        self, api: ScoringApi, server: ServerClient, facts: ServerFacts, token: int, seconds: float
    ) -> str | None:
        """The server's message that its model has no such token; None if it has."""
        try:
            await api.check_token(server, facts.model, token, seconds)
        except ServerRefused as error:
            if "vocab" not in error.message:
                raise
            return error.message
        return None

    async def _check_top(
        self, api: ScoringApi, server: ServerClient, facts: ServerFacts, seconds: float
    ) -> Finding | None:
        """An error if the server returns fewer likeliest tokens per position than the run needs; else None."""
        part = self.probe.ids[:2]
        try:
            await api.score(server, ScoreRequest(part, 1, self.top), model=facts.model, deadline=seconds)
        except ServerRefused as error:
            await api.score(server, ScoreRequest(part, 1), model=facts.model, deadline=seconds)  # refused as well?
            return Finding.error(
                "teacher-server",
                f"teacher_top_k={self.top}, and {server.url} does not name so many tokens at a position: "
                f"{error.message.rstrip('.')}.",
                f"Set a smaller teacher_top_k, or {api.advice['top'].format(top=self.top)}.",
            )
        return None

    async def _check_texts(
        self, api: ScoringApi, server: ServerClient, facts: ServerFacts, seconds: float
    ) -> tuple[list[Finding], list[ScoredToken]]:
        """Compare the texts of tokens; also returns the scores of the probe tokens, without the first of each part."""
        ids, size = self.probe.ids, max(2, min(PROBED, facts.max_context or PROBED))
        scored: list[ScoredToken] = []
        compared: list[tuple[int, str, str]] = []
        for start in range(0, len(ids) - 1, size - 1):
            part = ids[start : start + size]
            request = ScoreRequest(part, 1, self.top, self.temperature)
            answer = await api.score(server, request, model=facts.model, deadline=seconds)
            scored += answer
            own = self.probe.texts[start + 1 : start + size]
            for token, text, one in zip(part[1:], own, answer, strict=True):
                if one.text is not None and PART not in text + one.text and text.strip():  # whose space may differ
                    compared.append((token, text, one.text))
        if not compared:
            finding = Finding.error(
                "teacher-tokenizer",
                f"teacher={self.name!r}: {server.url} names no texts of tokens, so its tokenizer cannot be compared"
                " with the policy's.",
                "Start it with its tokenizer.",
            )
            return [finding], scored
        differ = [one for one in compared if one[1].strip() != one[2].strip()]
        if not differ:
            return [], scored
        token, ours, theirs = differ[0]
        finding = Finding.error(
            "teacher-tokenizer",
            f"teacher={self.name!r} has another tokenizer than the policy: at {server.url} {len(differ)} of"
            f" {len(compared)} tokens that were compared differ, the first is {token} ({ours!r} / {theirs!r})."
            " Distillation compares the same tokens.",
            "Choose a teacher of the same family, or train on its answers.",
        )
        return [finding], scored

    async def _check_temperature(
        self, api: ScoringApi, server: ServerClient, facts: ServerFacts, seconds: float
    ) -> list[Finding]:
        """Compare scores at temperature 1 and at the run's: differences between two log-probs shrink by the latter."""
        part = self.probe.ids[: min(64, facts.max_context or 64)]
        warm, cold = [
            await api.score(server, ScoreRequest(part, 1, 1, one), model=facts.model, deadline=seconds)
            for one in (self.temperature, 1.0)
        ]
        pairs = [
            (one.top[0][1] - one.logprob, other.top[0][1] - other.logprob)
            for one, other in zip(warm, cold, strict=True)
            if one.top and other.top
        ]
        size = sum(at_one * at_one for _, at_one in pairs)
        if not math.isfinite(size) or size < SURE:
            return []  # nothing to read it from
        factor = sum(there * at_one for there, at_one in pairs) / size
        if abs(factor * self.temperature - 1) <= SAME_TEMPERATURE:
            return []
        applied = f"{1 / factor:.3g}" if factor > 0 else "another"
        return [
            Finding.error(
                "teacher-server",
                f"teacher={self.name!r} scores at temperature {applied} where temperature={self.temperature:g} is asked"
                f" for ({server.url}), and the policy samples at {self.temperature:g}.",
                f"Set temperature=1.0, load the teacher by its folder or hub id, or {api.advice['temperature']}.",
            )
        ]


async def backend_of(server: ServerClient, seconds: float) -> ScoringApi:
    """The backend of a server that responds; ServerRefused if it has no API for scoring given tokens."""
    for api in BACKENDS:
        try:
            answer = await server.call("GET", api.identity, "find out which server this is", seconds)
        except ServerRefused as error:
            if "HTTP 404" in error.message or "HTTP 405" in error.message:
                continue
            raise
        if api.recognises(answer):
            return api
    names = " nor ".join(f"{api.name}'s" for api in BACKENDS)
    message = f"it is neither {names} own server, and others give no log-probs of tokens that they did not write"
    raise ServerRefused(server.url, "score tokens", message, "Serve the teacher's model with one of them.")


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean difference between two fingerprints, in nats; infinite if they cannot be compared."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=False) if math.isfinite(a) and math.isfinite(b)]
    return fmean(gaps) if gaps else math.inf
