"""Flags of `covey explain`: usage and help without importing torch or transformers."""

import argparse
from collections.abc import Callable
from typing import Any

from covey.cli.run_file import FlagParser
from covey.config.messages import closest

USAGE = """covey explain [--config] CONFIG [--field value ...] [flags below, with dashes or underscores]

Explain a run, given as a file and any of its settings: batches, updates, loss, tokens, memory and communication;
run the trainer's own checks; show the first prompt as the model reads it, the lengths of prompts, and the
rewards of two completions. The exit status is 2 if the run would not start."""


def flag_parser() -> argparse.ArgumentParser:
    """Parser of the flags that are no settings of a run."""
    parser = FlagParser(usage=USAGE, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    counts: dict[str, Any] = {"type": _whole(1), "metavar": "N"}
    add("--world_size", "--num_processes", **counts, help="explain it for N processes")
    sharding = "how the model is sharded: multi_gpu, fsdp2, zero1, zero2, zero3, or a file; also gives the processes"
    add("--accelerate_config", metavar="NAME", help=sharding)
    add("--gpu", type=_machine, metavar="NAME", help="a100, h100 or h200: estimate the time of a step there")
    add("--gpus_of_node", **counts, help="GPUs of one machine (8 if not given)")
    tokens = "of a prompt, for tokens and memory (the longest of the data set, or 256 if that is unknown)"
    add("--prompt_tokens", **counts, help=tokens)
    add("--gpu_memory", **counts, help="GiB of a GPU, if the run has another than this machine")
    add("--images", type=_whole(0), metavar="N", help="of a prompt, if the model sees images (1; 0: none)")
    add("--image_size", type=_image_size, metavar="WxH", help="in pixels (512x512)")
    return parser


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
    from covey.sizing.step_cost import MACHINES

    if name in MACHINES:
        return name
    raise argparse.ArgumentTypeError(
        f"{name!r} is not known; it is one of {', '.join(MACHINES)}.{closest(name, MACHINES)}"
    )
