"""Bytes between a trainer and the processes of a server, over gloo, without either."""

import gc
import json
import os
import select
import socket
import sys
import threading
import time

import pytest
import torch

from covey.engines.servers.weights.channels import Group, join, nccl_that_raises, open_store, own_address, shared_store
from tests.support import forking
from tests.support.launching import environment

HERE = "127.0.0.1"


def receiver(port, rank, world_size, seconds):
    """A server's process: takes two buckets and prints what they sum to."""
    channel = join("gloo", HERE, port, "run/1", rank, world_size, 30.0)
    cpu = torch.device("cpu")
    try:
        for size in (1000, 3):
            say(rank, channel.receive(size, cpu, seconds).sum().item())
    except RuntimeError as error:
        say(rank, str(error))
    channel.close()


def say(rank, what):
    """Print a line in one piece: `print` may write its end apart, after another process's line."""
    os.write(1, f"{json.dumps((rank, what))}\n".encode())


class Printed:
    """Lines that processes print."""

    def __init__(self):
        read, self.write = os.pipe()
        self.lines = os.fdopen(read, "rb", buffering=0)  # so that select sees all that is unread

    def get(self):
        """Wait for a line."""
        assert select.select([self.lines], [], [], 30.0)[0], "nothing is printed"
        return json.loads(self.lines.readline())


@pytest.fixture
def servers():
    """Starts server processes and gives the trainer's end; whatever they are at, they end with the test."""
    started, results = [], Printed()

    def start(count, seconds=30.0):
        store = open_store(HERE, 0, 30.0)
        for rank in range(1, count + 1):
            words = [str(word) for word in (store.port, rank, count + 1, seconds)]
            command = [sys.executable, __file__, *words]
            started.append(forking.Forked(command, env=environment(), stdout=results.write))
        return Group("gloo", store, "run/1", 0, count + 1, HERE, 60.0), results, started

    yield start
    for process in started:
        process.kill()
        process.wait(20)
    os.close(results.write)
    results.lines.close()


def test_every_process_of_a_server_gets_the_bytes(servers):
    channel, results, _ = servers(2)
    channel.send(torch.full((1000,), 2, dtype=torch.uint8), 30.0)
    channel.send(torch.tensor([1, 2, 4], dtype=torch.uint8), 30.0)
    got = sorted(results.get() for _ in range(4))
    assert got == [[1, 7], [1, 2000], [2, 7], [2, 2000]]


def test_a_killed_server_is_noticed_before_the_deadline(servers):
    channel, results, processes = servers(1)
    channel.send(torch.ones(1000, dtype=torch.uint8), 30.0)
    assert results.get() == [1, 1000]
    processes[0].kill()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"closed|reset|peer|timed out"):
        for _ in range(100):  # what is small may still fit into the connection's own buffers
            channel.send(torch.zeros(2**20, dtype=torch.uint8), 600.0)
    assert time.monotonic() - begun < 300.0


@pytest.mark.slow
def test_receiving_from_a_silent_trainer_ends_at_the_deadline(servers):
    kept, results, _ = servers(1, seconds=0.5)
    rank, said = results.get()
    assert rank == 1 and "imed out" in said
    kept.close()


def test_sending_to_a_silent_server_ends_at_the_deadline(servers):
    channel, results, _ = servers(1)
    for size in (1000, 3):
        channel.send(torch.ones(size, dtype=torch.uint8), 30.0)
        results.get()
    # it is done: what follows is not taken
    with pytest.raises(RuntimeError):
        for _ in range(100):
            channel.send(torch.zeros(2**20, dtype=torch.uint8), 0.5)


def test_a_closed_channel_says_so():
    store = open_store(HERE, 0, 30.0)
    channel = Group("gloo", store, "run/1", 0, 1, HERE, 30.0)
    channel.close()
    with pytest.raises(RuntimeError, match="was closed"):
        channel.send(torch.zeros(1, dtype=torch.uint8), 1.0)


def test_the_store_listens_on_its_address_and_port_alone():
    store = open_store(HERE, 0, 30.0)
    with pytest.raises(OSError, match="in use"):
        open_store(HERE, store.port, 30.0)


def test_unknown_channels_are_refused():
    with pytest.raises(ValueError, match="'carrier pigeon' is not known"):
        join("carrier pigeon", HERE, 1, "run/1", 1, 2, 1.0)


def test_own_address_for_this_machine_is_the_loopback_one():
    assert own_address("localhost", 80) in (HERE, "::1")


def test_trainers_of_one_process_share_a_port():
    with socket.socket() as one:
        one.bind((HERE, 0))
        port = one.getsockname()[1]
    store = shared_store(HERE, port)
    assert shared_store(HERE, port) is store
    with pytest.raises(OSError, match="in use"):
        open_store(HERE, port, 30.0)
    del store
    gc.collect()
    assert open_store(HERE, port, 30.0).port == port


def test_groups_that_form_at_once_leave_the_environment_alone(monkeypatch):
    name = "TORCH_NCCL_BLOCKING_WAIT"
    monkeypatch.delenv(name, raising=False)
    seen = []

    def form():
        with nccl_that_raises():
            time.sleep(0.02)
            seen.append(os.environ[name])

    threads = [threading.Thread(target=form) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["1"] * 3 and name not in os.environ


if __name__ == "__main__":
    words = sys.argv[1:]
    receiver(*map(int, words[:3]), float(words[3]))
