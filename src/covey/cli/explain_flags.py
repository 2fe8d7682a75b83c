"""Flags of `covey explain` that are no settings of a run: taken out of its arguments before these are read."""

from covey.trainers.spread import Cluster, Spread
from covey.trainers.timing import MACHINES


def take_number(flag: str, argv: list[str]) -> tuple[int | None, list[str]]:
    """Take `flag N` or `flag=N` out of an argument list."""
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") == flag[2:]:
            rest = argv[:i] + argv[i + (1 if equals else 2) :]
            value = value if equals else "".join(argv[i + 1 : i + 2])
            if not value.isdigit() or int(value) < 1:
                raise ValueError(f"{flag} must be a whole number, 1 or more, not {value!r}.")
            return int(value), rest
    return None, argv


def take_word(flag: str, argv: list[str]) -> tuple[str | None, list[str]]:
    """Take `flag WORD` or `flag=WORD` out of an argument list."""
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") == flag[2:]:
            if not equals and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
                raise ValueError(f"{flag} needs a value after it.")
            return value if equals else argv[i + 1], argv[:i] + argv[i + (1 if equals else 2) :]
    return None, argv


def take_cluster(processes: int, argv: list[str]) -> tuple[Cluster | None, list[str]]:
    """Take what says how processes share a model, and which GPUs they run on; None where nothing does.

    Raises:
        ValueError: a way or a GPU is not known.
    """
    way, argv = take_word("--accelerate_config", argv)
    machine, argv = take_word("--gpu", argv)
    gpus_of_node, argv = take_number("--gpus_of_node", argv)
    if machine is not None and machine not in MACHINES:
        raise ValueError(f"--gpu {machine!r} is not known; it is one of {', '.join(MACHINES)}.")
    if way is None and machine is None:
        return None, argv
    return Cluster(Spread.of(way or "multi_gpu", processes), machine, gpus_of_node or 8), argv
