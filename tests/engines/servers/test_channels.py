"""Bytes between a trainer and the processes of a server, over gloo, without either."""

import gc
import multiprocessing
import socket
import time

import pytest
import torch

from covey.engines.servers.weights.channels import Group, join, open_store, own_address, shared_store

HERE = "127.0.0.1"


def receiver(port, rank, world_size, seconds, results):
    """A server's process: takes two buckets and says what they sum to."""
    torch.set_num_threads(1)
    channel = join("gloo", HERE, port, "run/1", rank, world_size, 30.0)
    cpu = torch.device("cpu")
    try:
        for size in (1000, 3):
            results.put((rank, channel.receive(size, cpu, {}, seconds).sum().item()))
    except RuntimeError as error:
        results.put((rank, str(error)))
    channel.close()


@pytest.fixture
def servers():
    """Starts server processes and gives the trainer's end; whatever they are at, they end with the test."""
    spawning = multiprocessing.get_context("spawn")
    started = []

    def start(count, seconds=30.0):
        store = open_store(HERE, 0, 30.0)
        results = spawning.Queue()
        for rank in range(1, count + 1):
            args = (store.port, rank, count + 1, seconds, results)
            started.append(spawning.Process(target=receiver, args=args, daemon=True))
            started[-1].start()
        return Group("gloo", store, "run/1", 0, count + 1, HERE, 60.0), results, started

    yield start
    for process in started:
        process.kill()
        process.join()


def test_every_process_of_a_server_gets_the_bytes(servers):
    channel, results, _ = servers(2)
    channel.send(torch.full((1000,), 2, dtype=torch.uint8), 30.0)
    channel.send(torch.tensor([1, 2, 4], dtype=torch.uint8), 30.0)
    got = sorted(results.get(timeout=30) for _ in range(4))
    assert got == [(1, 7), (1, 2000), (2, 7), (2, 2000)]


def test_a_killed_server_is_noticed_before_the_deadline(servers):
    channel, results, processes = servers(1)
    channel.send(torch.ones(1000, dtype=torch.uint8), 30.0)
    assert results.get(timeout=30) == (1, 1000)
    processes[0].kill()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"closed|reset|peer"):
        for _ in range(100):  # what is small may still fit into the connection's own buffers
            channel.send(torch.zeros(2**20, dtype=torch.uint8), 60.0)
    assert time.monotonic() - begun < 30.0


def test_receiving_from_a_silent_trainer_ends_at_the_deadline(servers):
    kept, results, _ = servers(1, seconds=0.5)
    rank, said = results.get(timeout=30)
    assert rank == 1 and "imed out" in said
    kept.close()


def test_sending_to_a_silent_server_ends_at_the_deadline(servers):
    channel, results, _ = servers(1)
    for size in (1000, 3):
        channel.send(torch.ones(size, dtype=torch.uint8), 30.0)
        results.get(timeout=30)
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
    store = shared_store(HERE, port, 30.0)
    assert shared_store(HERE, port, 30.0) is store
    with pytest.raises(OSError, match="in use"):
        open_store(HERE, port, 30.0)
    del store
    gc.collect()
    assert open_store(HERE, port, 30.0).port == port
