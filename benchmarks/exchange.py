"""Bytes that each process receives so that rollouts are trained on where tokens are even, by number of processes.

    python -m benchmarks.exchange [--processes 2 4 8]

Every process samples 8 prompts of 256 tokens, 8 completions each (geometric lengths, mean 200, at most 512), with an
image of 1 MB for each prompt or none. "whole batches" gathers the batch of every process in every process, as Covey did
before; "what moves" shares sizes and sends what the plan of an optimizer step assigns to another process.
"""

import argparse
import os
import socket
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from covey.core.batch import TrainBatch, collate
from covey.core.media import Media
from covey.core.packing import balance_ranks
from covey.core.records import FinishReason, Rollout
from covey.trainer.distributed.collectives import Collectives
from covey.trainer.distributed.exchange import pool
from covey.trainer.microbatches import nominal_parts

PROMPTS, GROUP, PROMPT_TOKENS, IMAGE_FLOATS = 8, 8, 256, 2**18


def sampled(rank: int, images: bool) -> TrainBatch:
    """One process's share of a rollout batch."""
    chance = torch.Generator().manual_seed(rank)
    rollouts = []
    for _ in range(PROMPTS):
        prompt = torch.randint(50_000, (PROMPT_TOKENS,), generator=chance).tolist()
        pixels = {"pixel_values": torch.rand(1, IMAGE_FLOATS, generator=chance)}
        media = (Media((), pixels, {}, 0, 64, ()),) if images else ()
        for _ in range(GROUP):
            length = int(torch.empty(1).geometric_(1 / 200, generator=chance).clamp(max=512))
            ids = torch.randint(50_000, (length,), generator=chance).tolist()
            rollouts.append(Rollout(prompt, ids, [True] * length, [-1.0] * length, "", FinishReason.STOP, media=media))
    batch = collate(rollouts)
    batch.advantages, batch.weights = torch.randn(2, batch.num_tokens, generator=chance)
    return batch


class Received:
    """Counts the bytes that collectives bring from other processes."""

    def __init__(self) -> None:
        self.bytes = 0
        all_gather, all_to_all = dist.all_gather, dist.all_to_all_single

        def counted_gather(parts: list[torch.Tensor], mine: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes += (len(parts) - 1) * mine.nbytes
            return all_gather(parts, mine, *args, **kwargs)

        def counted_exchange(received: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes += received.nbytes
            return all_to_all(received, *args, **kwargs)

        dist.all_gather, dist.all_to_all_single = counted_gather, counted_exchange

    def drain(self) -> int:
        """Bytes since the last call."""
        count, self.bytes = self.bytes, 0
        return count


def measure(rank: int, size: int, port: int, results: Any) -> None:
    """In each process: bytes by kind of batch and way of exchange."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    collectives = Collectives(rank, size, 300.0, lambda: 0)
    received, found = Received(), {}
    for images in (False, True):
        batch = sampled(rank, images)
        collectives.meet("begin")
        received.drain()
        collectives.gather(batch.state(), "gather whole batches")
        found[images, "whole batches"] = received.drain()
        for steps in (1, 4):
            own, index = pool(batch, collectives)
            parts = nominal_parts(len(index), len(batch) // steps, size)
            for part in parts:
                step = index.select(part)
                own.fetch(step, balance_ranks(step, size, "shared_prefix"), collectives)
            found[images, f"what moves, {steps} step{'s' * (steps > 1)}"] = received.drain()
    results.put(found)
    dist.destroy_process_group()


def run(size: int) -> dict[tuple[bool, str], float]:
    """Mean bytes received by each of `size` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=measure, args=(rank, size, port, results)) for rank in range(size)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return {key: statistics.mean(counts[key] for counts in found) for key in found[0]}


def table(measured: dict[int, dict[tuple[bool, str], float]]) -> str:
    """Megabytes that a process receives, a line for each way and kind of batch."""
    lines = ["| MB received by each process | " + " | ".join(f"{size} processes" for size in measured) + " |"]
    lines.append("|---" * (len(measured) + 1) + "|")
    for images, way in next(iter(measured.values())):
        cells = [f"{found[images, way] / 1e6:.2f}" for found in measured.values()]
        lines.append(f"| {'images' if images else 'text'}: {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    os.environ["OMP_NUM_THREADS"] = "1"
    print(table({size: run(size) for size in parser.parse_args(arguments).processes}))


if __name__ == "__main__":
    main()
