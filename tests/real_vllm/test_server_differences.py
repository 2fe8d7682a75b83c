"""Differences of weights and a real vLLM server: its model is what a full update of the same weights makes it."""

import asyncio
import copy
import time

import pytest
import torch

from covey.engines.servers.engine import RemoteEngine
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.pool_file import PoolFile
from covey.engines.servers.vllm.api import VllmApi
from covey.engines.servers.vllm.weights import call_workers
from covey.policy.weights import weight_update
from tests.real_vllm.serving import SHAPE
from tests.support import tiny
from tests.support.servers.senders import vllm_sender

READING = "tests.real_vllm.reading.ReadingWorker"  # not imported: that needs vLLM

pytestmark = pytest.mark.vllm


def policy(seed, **changes):
    """In bfloat16, in which the weights travel; the server computes in float32 with these numbers."""
    return tiny.model(seed=seed, **SHAPE, **changes).bfloat16()


def change(model, version):
    """Move one number in 500, another one for each version."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[version % 500 :: 500] += 0.25


def sends(running, sender, update):
    return asyncio.run(sender.send([ServerClient(running.url)], update, 60.0))


def held_by(running):
    """Checksums of what the server's model holds."""
    asked = call_workers(ServerClient(running.url), "read_checksums", "compare", 60.0)
    return asyncio.run(asked)[0]


def after_a_full_update(running, model):
    sender = vllm_sender("group")
    try:
        sends(running, sender, weight_update(model, 10**6))
    finally:
        sender.close()
    return held_by(running)


@pytest.mark.parametrize("tied", [False, True])
def test_after_fifty_differences_the_server_holds_every_bit(start_server, tmp_path, tied):
    model = policy(1, tie_word_embeddings=tied)
    folder = tmp_path / "model"
    tiny.folder(folder, **SHAPE, tie_word_embeddings=tied)
    running = start_server("--worker-extension-cls", READING, model=str(folder))
    sender = vllm_sender("group", differences=True, bucket_bytes=50_000)
    try:
        whole = sends(running, sender, weight_update(model, 0)).nbytes
        seen = {str(held_by(running))}
        for version in range(1, 51):
            change(model, version)
            sent = sends(running, sender, weight_update(model, version))
            assert sent.whole == 0 and sent.nbytes < whole / 20
            if version in (1, 25, 50):
                seen.add(str(held_by(running)))
        assert len(seen) == 4
        found = held_by(running)
    finally:
        sender.close()
    assert found == after_a_full_update(running, model)


def test_servers_join_and_are_killed_and_the_trainer_too(start_server, tmp_path):
    """One server, a second from update 5 on; the first is killed after update 8, a new trainer begins at 12."""
    flags = "--worker-extension-cls", READING
    first, second = start_server(*flags), start_server(*flags)
    path, model = tmp_path / "pool.txt", policy(2)
    path.write_text(first.url)

    def engine():
        file, sender = PoolFile(path), vllm_sender("group", differences=True, bucket_bytes=50_000)
        return RemoteEngine(file.servers(), VllmApi(), sender, ends=frozenset({1}), pool_file=file, resend=True)

    trainer, whole = engine(), []
    try:
        for version in range(16):
            if version == 5:
                path.write_text(f"{first.url}\n{second.url}\n")
            elif version == 8:
                first.process.stop()
            elif version == 12:  # as when it is killed: nothing is handed over
                trainer.close()
                path.write_text(second.url)
                trainer = engine()
            change(model, version)
            sent = trainer.load_weights(weight_update(copy.deepcopy(model), version))
            whole.append(sent.whole)
            with trainer.awake():
                if version == 5:
                    wait_for_both(trainer)
        assert whole == [1, *[0] * 11, 1, 0, 0, 0]
        found = held_by(second)
    finally:
        trainer.close()
    assert found == after_a_full_update(second, model)


def wait_for_both(engine, seconds=60.0):
    end = time.monotonic() + seconds
    while sum(member.up for member in engine._pool.members) < 2:
        assert time.monotonic() < end, "the second server did not join"
        time.sleep(0.05)
