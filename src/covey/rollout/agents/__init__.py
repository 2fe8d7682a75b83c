"""Agents that are programs: the endpoint they talk to, their sessions, and starting them."""

from covey.rollout.agents.program import AgentProgram as AgentProgram
from covey.rollout.agents.program import RemoteAgents as RemoteAgents
from covey.rollout.agents.program import with_agent as with_agent
from covey.rollout.seats import Seat as Seat
