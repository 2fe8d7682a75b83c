"""Kinds of teachers, by what `teacher` of a config names: the policy, a server or a model."""

from typing import Any

OF_THE_POLICY = ("start", "policy", "follower")
"""Teachers that are the policy, at some time or with another prompt."""


def is_server(source: Any) -> bool:
    """True for one or several vLLM or SGLang servers, named by URL.

    Example:
        >>> is_server("http://gpu-7:8000"), is_server("Qwen/Qwen3-4B"), is_server("start")
        (True, False, False)
    """
    return isinstance(source, str) and source.lstrip().startswith(("http://", "https://"))


def is_loaded(source: Any) -> bool:
    """True for a model of its own in this process: a folder, a hub id or a model."""
    return not (is_server(source) or source in OF_THE_POLICY)
