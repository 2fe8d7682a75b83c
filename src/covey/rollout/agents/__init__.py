"""Agents that are programs: the endpoint they talk to, their sessions, and starting them."""
