"""Rules about tools, environments and rollout functions."""

from typing import Any

from covey.config.rules.helpers import closest


def rollouts_have_deadlines(args: Any) -> None:
    """A call and a rollout may take some time, and not for ever."""
    for name in ("tool_timeout", "rollout_timeout"):
        value = getattr(args, name)
        if not value > 0 or value == float("inf"):
            raise ValueError(f"{name}={value!r} must be a number of seconds, greater than 0 and finite.")


def tool_rounds_are_counted(args: Any) -> None:
    """Rounds of calls are a whole number."""
    rounds = args.max_tool_calling_iterations
    if rounds is not None and (type(rounds) is not int or rounds < 0):
        raise ValueError(
            f"max_tool_calling_iterations={rounds!r} must be a whole number of rounds, 0 or more; leave it unset for as"
            " many as the model asks for."
        )


def tool_parser_is_known(args: Any) -> None:
    """The notation of calls is one that can be read."""
    if args.tool_parser is None:
        return
    from covey.rollout.tools.parsers import TOOL_PARSERS

    if args.tool_parser not in TOOL_PARSERS:
        raise ValueError(
            f"tool_parser={args.tool_parser!r} is not known; choose one of: {', '.join(TOOL_PARSERS)}."
            f"{closest(args.tool_parser, TOOL_PARSERS)} To add your own, register it in"
            " covey.rollout.tools.parsers.TOOL_PARSERS."
        )
