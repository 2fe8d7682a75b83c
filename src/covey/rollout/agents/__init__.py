"""Agents that are programs: starting them, the endpoint that they send requests to, and their sessions."""

from covey.rollout.agents.program import AgentProgram as AgentProgram
from covey.rollout.agents.program import RemoteAgents as RemoteAgents
from covey.rollout.agents.program import with_agent as with_agent
from covey.rollout.seats import Seat as Seat
