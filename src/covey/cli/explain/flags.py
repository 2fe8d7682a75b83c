"""Flags of `covey explain` that are no settings of a run: taken out of its arguments before these are read."""

from dataclasses import dataclass

import yaml

from covey.cli.explain.images import image_size
from covey.cli.launch import find_config
from covey.config.messages import closest
from covey.sizing.memory import SHARDED, ShardCounts
from covey.sizing.step_cost import MACHINES
from covey.sizing.vllm_memory import GIB


@dataclass(frozen=True)
class Cluster:
    """Training processes and their machines.

    Attributes:
        spread: shards of the model.
        machine: a key of `MACHINES`; None: no time is estimated.
        gpus_of_node: GPUs of one machine.
    """

    spread: ShardCounts
    machine: str | None = None
    gpus_of_node: int = 8


@dataclass(frozen=True)
class Flags:
    """What they say.

    Attributes:
        world_size: processes; None: as many as are running.
        prompt_tokens: of a prompt, its images aside; None: an assumption.
        gpu: bytes of a GPU; None: this machine's.
        images: of a prompt, for a model that sees them.
        image_size: width and height of each, in pixels.
        cluster: how processes share the model; None: each has all of it.
    """

    world_size: int | None
    prompt_tokens: int | None
    gpu: int | None
    images: int
    image_size: tuple[int, int]
    cluster: Cluster | None


def take_flags(argv: list[str]) -> tuple[Flags, list[str]]:
    """Take all of them out of an argument list.

    Raises:
        ValueError: one has no value, or none that it can have.
    """
    world_size, argv = take_number("--world_size", argv)
    processes, argv = take_number("--num_processes", argv)  # as the launcher calls it
    prompt_tokens, argv = take_number("--prompt_tokens", argv)
    gib, argv = take_number("--gpu_memory", argv)
    images, argv = take_number("--images", argv, least=0)
    size, argv = take_word("--image_size", argv)
    cluster, argv = take_cluster(world_size or processes, argv)
    world_size = cluster.spread.processes if cluster else world_size or processes
    gpu = gib * GIB if gib else None
    return Flags(world_size, prompt_tokens, gpu, 1 if images is None else images, image_size(size), cluster), argv


def take_number(flag: str, argv: list[str], least: int = 1) -> tuple[int | None, list[str]]:
    """Take `flag N` or `flag=N` out of an argument list."""
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") == flag[2:]:
            rest = argv[:i] + argv[i + (1 if equals else 2) :]
            value = value if equals else "".join(argv[i + 1 : i + 2])
            if not value.isdigit() or int(value) < least:
                raise ValueError(f"{flag} must be a whole number, {least} or more, not {value!r}.")
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


def take_cluster(processes: int | None, argv: list[str]) -> tuple[Cluster | None, list[str]]:
    """Take what says how processes share a model, and which GPUs they run on; None where nothing does.

    Args:
        processes: how many; None: as many as the config says, or one.
        argv: the arguments.

    Raises:
        ValueError: a way or a GPU is not known.
    """
    config, argv = take_word("--accelerate_config", argv)
    machine, argv = take_word("--gpu", argv)
    gpus_of_node, argv = take_number("--gpus_of_node", argv)
    if machine is not None and machine not in MACHINES:
        raise ValueError(
            f"--gpu {machine!r} is not known; it is one of {', '.join(MACHINES)}.{closest(machine, MACHINES)}"
        )
    if config is None and machine is None:
        return None, argv
    way, usual = ("multi_gpu", 1) if config is None else way_of(config)
    return Cluster(ShardCounts.of(way, processes or usual), machine, gpus_of_node or 8), argv


def way_of(config: str) -> tuple[str, int]:
    """How an accelerate config has processes share a model, and how many there are.

    Args:
        config: the name of one that comes with Covey, or the path of another.

    Raises:
        ValueError: there is no such config, or it shares in a way that is not trained with.
    """
    path = find_config(config)
    try:
        said = yaml.safe_load(path.read_text())
        kind, processes = str(said["distributed_type"]).upper(), int(said.get("num_processes") or 1)
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"--accelerate_config {config!r} cannot be read as a config of accelerate, which names a distributed_type"
            f" and num_processes ({type(error).__name__}: {str(error).splitlines()[0]}). `accelerate config` makes"
            " one."
        ) from error
    stage = (said.get("deepspeed_config") or {}).get("zero_stage")
    version = (said.get("fsdp_config") or {}).get("fsdp_version")
    ways = {"FSDP": f"fsdp{version or 1}", "DEEPSPEED": f"zero{stage}", "NO": "multi_gpu", "MULTI_CPU": "multi_gpu"}
    way = ways.get(kind, kind.lower())
    if way not in SHARDED:
        raise ValueError(
            f"--accelerate_config {config!r} shares the model as {way!r}, which Covey does not train with; it trains"
            f" with {', '.join(SHARDED)}."
        )
    return way, processes
