"""Flags of `covey explain` that are no settings of a run."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import yaml

from covey.cli.config_file import FlagParser
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
    """Parsed flags.

    Attributes:
        world_size: processes; None: those that are running.
        prompt_tokens: tokens of a prompt without its images; None: an assumption.
        gpu: bytes of a GPU; None: this machine's.
        images: images of a prompt, for a model that sees them.
        image_size: width and height of each in pixels.
        cluster: processes and machines; None: each process has all of the model.
    """

    world_size: int | None
    prompt_tokens: int | None
    gpu: int | None
    images: int
    image_size: tuple[int, int]
    cluster: Cluster | None


def take_flags(argv: list[str]) -> tuple[Flags, list[str]]:
    """Parse the flags in an argument list, and return the other arguments.

    Raises:
        ValueError: a flag without a value, or with a wrong one.
    """
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world_size", "--world-size", "--num_processes", "--num-processes", type=_whole(1))
    parser.add_argument("--prompt_tokens", "--prompt-tokens", type=_whole(1))
    parser.add_argument("--gpu_memory", "--gpu-memory", type=_whole(1))
    parser.add_argument("--images", type=_whole(0), default=1)
    parser.add_argument("--image_size", "--image-size", type=_image_size, default=(512, 512))
    parser.add_argument("--accelerate_config", "--accelerate-config")
    parser.add_argument("--gpu", type=_machine)
    parser.add_argument("--gpus_of_node", "--gpus-of-node", type=_whole(1), default=8)
    found, rest = parser.parse_known_args(argv)
    cluster = None
    if found.accelerate_config is not None or found.gpu is not None:
        sharding, processes = ("multi_gpu", 1)
        if found.accelerate_config is not None:
            sharding, processes = sharding_of(found.accelerate_config)
        found.world_size = found.world_size or processes
        cluster = Cluster(ShardCounts.of(sharding, found.world_size), found.gpu, found.gpus_of_node)
    gpu = found.gpu_memory * GIB if found.gpu_memory else None
    return Flags(found.world_size, found.prompt_tokens, gpu, found.images, found.image_size, cluster), rest


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more.")
        return int(text)

    return parse


def _image_size(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not width x height in pixels, as in 640x480.")
    return int(sides[0]), int(sides[1])


def _machine(name: str) -> str:
    if name not in MACHINES:
        raise argparse.ArgumentTypeError(
            f"{name!r} is not known; it is one of {', '.join(MACHINES)}.{closest(name, MACHINES)}"
        )
    return name


def sharding_of(config: str) -> tuple[str, int]:
    """Sharding (a key of `SHARDED`) and number of processes of an accelerate config.

    Args:
        config: the name of one that comes with Covey, or the path of another.

    Raises:
        ValueError: there is no such config, or Covey does not train with its sharding.
    """
    path = find_config(config)
    try:
        values = yaml.safe_load(path.read_text())
        kind, processes = str(values["distributed_type"]).upper(), int(values.get("num_processes") or 1)
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"--accelerate_config {config!r} cannot be read as a config of accelerate, which names a distributed_type"
            f" and num_processes ({type(error).__name__}: {str(error).splitlines()[0]}). `accelerate config` makes"
            " one."
        ) from error
    stage = (values.get("deepspeed_config") or {}).get("zero_stage")
    version = (values.get("fsdp_config") or {}).get("fsdp_version")
    names = {"FSDP": f"fsdp{version or 1}", "DEEPSPEED": f"zero{stage}", "NO": "multi_gpu", "MULTI_CPU": "multi_gpu"}
    sharding = names.get(kind, kind.lower())
    if sharding not in SHARDED:
        raise ValueError(
            f"--accelerate_config {config!r} shares the model as {sharding!r}, which Covey does not train with; it"
            f" trains with {', '.join(SHARDED)}."
        )
    return sharding, processes
