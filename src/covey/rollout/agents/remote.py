"""Agents that run elsewhere: each asks for a session over HTTP, plays its rollout there, and reports a reward."""

import asyncio
import json
import os
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from covey.core.records import Rollout
from covey.rollout.agents.endpoint import AgentEndpoint, Service
from covey.rollout.agents.session import AgentSession, checked_seats
from covey.rollout.environments.agent import REWARD
from covey.rollout.environments.interface import EnvironmentFailed, checked_number
from covey.rollout.episode import EpisodeEngine

PATIENCE = 30.0  # seconds that a request for a session waits for a rollout
KEY_VARIABLE = "COVEY_AGENTS_KEY"


@dataclass(eq=False)
class _Open:
    """A rollout that waits for an agent, or for its end."""

    row: dict[str, Any]
    key: str  # of its session at the endpoint
    reward: asyncio.Future[Any]


class RemoteAgents:
    """Rollouts for agents that run elsewhere; `rollout_timeout` includes the wait for an agent.

    `POST /sessions` returns `{"id", "row", "base_url", "api_key"}` of a rollout, `POST /sessions/ID/reward` with
    `{"reward": number or null}`, or with `{"error": text}`, ends it. Both need the key as `Authorization: Bearer`.

    Args:
        port: of the endpoint.
        host: address that it listens on; others than 127.0.0.1 are open to the network, without encryption.
        key: that agents need to get sessions; the variable COVEY_AGENTS_KEY by default.
        seats: as of `AgentProgram`.

    Raises:
        ValueError: there is no key, or one of fewer than 16 characters.
    """

    optional_reward = True
    text_only = True

    def __init__(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        key: str | None = None,
        seats: Mapping[str, Any] | None = None,
    ):
        self.seats = checked_seats(seats)
        self._address, self._key = (host, port), key or os.environ.get(KEY_VARIABLE, "")
        if len(self._key) < 16:
            raise ValueError(
                f"remote agents need a key of at least 16 characters, got {len(self._key)}: give `key`, or set the"
                f" variable {KEY_VARIABLE}."
            )
        self._service: Service | None = None
        self._waiting: deque[_Open] = deque()
        self._open: dict[str, _Open] = {}
        self._arrived = asyncio.Event()

    async def play(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """One rollout. Always to be called on the same event loop."""
        loop = asyncio.get_running_loop()
        if self._service is None or self._service.loop is not loop:
            self._arrived = asyncio.Event()
            routes = [web.post("/sessions", self._begin), web.post("/sessions/{id}/reward", self._end)]
            self._service = Service(endpoint=AgentEndpoint(*self._address, routes))
        service = self._service
        await asyncio.shield(service.ready)
        session = AgentSession(engine, seats=self.seats)
        waiting = _Open(row, service.endpoint.open(session), loop.create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        given = None
        try:
            given = await waiting.reward
        except EnvironmentFailed:
            if not session.full:  # as programs may fail where a request found no room
                raise
        finally:
            service.endpoint.close(waiting.key)
            self._open = {number: one for number, one in self._open.items() if one is not waiting}
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        if not session.asked:
            raise EnvironmentFailed("the agent ended without a reply of the policy")
        extras: dict[str, Any] = {REWARD: checked_number(given, "the agent")}
        return session.rollout(**extras)

    def close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.end()

    async def _begin(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _error("this is not the key for sessions.", 401)
        until = asyncio.get_running_loop().time() + PATIENCE
        while not self._waiting:
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._arrived.wait()
            except TimeoutError:
                return _error("no rollout waits for an agent: ask again.", 503)
        if request.transport is None or request.transport.is_closing():
            return _error("the agent has gone.", 499)  # the rollout is for another
        number, one = secrets.token_hex(8), self._waiting.popleft()
        self._open[number] = one
        access = {"base_url": f"http://{request.host}/v1", "api_key": one.key}
        return web.json_response(
            {"id": number, "row": one.row, **access}, dumps=lambda value: json.dumps(value, default=str)
        )

    async def _end(self, request: web.Request) -> web.Response:
        one = self._open.get(request.match_info["id"])
        if not self._allowed(request, "" if one is None else one.key):
            return _error("this is not the key of the session.", 401)
        if one is None or one.reward.done():
            return _error("there is no such session, or it has ended.", 404)
        try:
            body = await request.json()
            error, reward = body.get("error"), checked_number(body.get("reward"), "the agent")
        except (ValueError, AttributeError, EnvironmentFailed) as wrong:
            return _error(f"the body must be JSON with a reward: {wrong}.", 400)
        if error:
            one.reward.set_exception(EnvironmentFailed(f"the agent reported: {str(error)[:500]}"))
        else:
            one.reward.set_result(reward)
        return web.json_response({})

    def _allowed(self, request: web.Request, *more: str) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip().encode()
        return any(secrets.compare_digest(given, key.encode()) for key in (self._key, *more) if key)


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
