"""Plans over all processes, and the rollouts that move: threads stand for processes, a board for the network."""

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from covey.core.batch import TOKEN_FIELDS, TrainBatch, collate, join
from covey.core.media import Media
from covey.core.packing import balance_ranks
from covey.core.records import FinishReason, Rollout
from covey.trainer.distributed.collectives import Collectives, pack, unpack
from covey.trainer.distributed.exchange import RolloutIndex, join_indexes, moves, pool
from covey.trainer.microbatches import RolloutBuffer


def batch_of(rank, images=False, reports=True):
    """Four rollouts of one process: two continue a prompt of its own, two a prompt that all processes share."""
    prompts = [[rank + 10] * 3] * 2 + [[7, 7]] * 2
    shown = [Media((), {"pixel_values": torch.full((1, 4), float(rank))}, {}, 0, 1, ()) for _ in range(2)]
    rollouts = [
        Rollout(
            prompt,
            list(range(1, 2 + rank + number)),
            [True] * (1 + rank + number),
            [-0.5] * (1 + rank + number) if reports else None,
            "",
            FinishReason.STOP,
            media=(shown[number // 2],) if images else (),
        )
        for number, prompt in enumerate(prompts)
    ]
    batch = collate(rollouts)
    batch.advantages = torch.arange(batch.num_tokens) * (torch.arange(batch.num_tokens) % 3 > 0) + 0.25 * rank
    batch.weights = torch.ones(batch.num_tokens) / (rank + 1)
    batch.term_tokens = {"extra": (torch.arange(batch.num_tokens) % 2) * (rank + 0.5)}
    batch.term_scales = {"extra": torch.arange(len(batch)) + 0.5 * rank}
    return batch


def test_rollouts_without_a_source_keep_their_place_among_those_with_one():
    taught, shown = (RolloutIndex.of(batch_of(rank), rank) for rank in range(2))
    taught = replace(taught, sources=torch.tensor([0, 1, 1, 0]))
    assert join_indexes([shown, taught]).sources.tolist() == [-1, -1, -1, -1, 0, 1, 1, 0]


class Network:
    """`Collectives` of several threads; notes what `exchange` carries."""

    def __init__(self, size):
        self.size = size
        self.barrier, self.board, self.sent = threading.Barrier(size, timeout=600), [None] * size, []

    def of(self, rank):
        processes = Collectives(rank, 1, 1.0, lambda: 0)
        processes.size = self.size
        processes.gather, processes.exchange = partial(self.gather, rank), partial(self.exchange, rank)
        return processes

    def gather(self, rank, mine, what):
        self.barrier.wait()
        self.board[rank] = pack(mine)
        self.barrier.wait()
        return [unpack(message) for message in self.board]

    def exchange(self, rank, outgoing, what):
        self.sent += [(rank, to, message) for to, message in enumerate(outgoing) if message is not None]
        return [theirs[rank] for theirs in self.gather(rank, outgoing, what)]


def together(size, work):
    """The results of `work(rank, collectives)` on every process."""
    network, results, errors = Network(size), [None] * size, []

    def run(rank):
        try:
            results[rank] = work(rank, network.of(rank))
        except BaseException as error:
            errors.append(error)
            network.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results, network.sent


def assert_same(ours: TrainBatch, expected: TrainBatch):
    for name in (*TOKEN_FIELDS, "lengths", "prompt_ids", "prompt_lengths", "groups"):
        mine, theirs = getattr(ours, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or torch.equal(mine.nan_to_num(9.0), theirs.nan_to_num(9.0)), name
    for name in ("term_tokens", "term_scales"):
        mine, theirs = getattr(ours, name), getattr(expected, name)
        assert [*mine] == [*theirs] and all(map(torch.equal, mine.values(), theirs.values()))
    shown = [
        [[one.tensors["pixel_values"].tolist() for one in media] for media in batch.media or []]
        for batch in (ours, expected)
    ]
    assert shown[0] == shown[1]


def index_of(owners, rows):
    zeros = torch.zeros(len(owners), dtype=torch.long)
    return RolloutIndex(
        owners=torch.tensor(owners),
        rows=torch.tensor(rows),
        lengths=zeros + 1,
        sampled_lengths=zeros + 1,
        has_signal=zeros == 0,
        groups=zeros,
        prompt_lengths=torch.tensor([1]),
        prompt_keys=torch.tensor([[0, 0]]),
    )


def test_each_process_sends_what_others_train_on():
    # Rollouts 0-2 lie on process 0, 3-5 on process 1. Process 0 trains on 0, 4 and 5, process 1 on 1, 2 and 3.
    index = index_of([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2])
    shares = [torch.tensor([0, 4, 5]), torch.tensor([1, 2, 3])]
    assert moves(index, shares) == (((0,), (1, 2)), ((1, 2), (0,)))


def test_a_rollout_that_a_step_goes_through_twice_moves_once():
    index = index_of([0, 1, 0, 1], [0, 0, 0, 0])
    assert moves(index, [torch.tensor([0, 1, 2, 3]), torch.tensor([], dtype=torch.long)]) == (((0,), ()), ((0,), ()))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("images", [False, True])
def test_shares_equal_those_of_one_joined_batch(size, images):
    batches = [batch_of(rank, images and rank != 1, reports=rank != 0) for rank in range(size)]
    whole = join(batches)

    def fetch(rank, processes):
        own, index = pool(batches[rank], processes)
        window = index.select(torch.arange(len(index) - 1).flip(0))
        shares = balance_ranks(window, size, "shared_prefix")
        return shares, [own.fetch(window, shares, processes) for _ in range(2)]

    results, sent = together(size, fetch)
    window = whole.select(torch.arange(len(whole) - 1).flip(0))
    shares = balance_ranks(window, size, "shared_prefix")
    for rank, (planned, fetched) in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(planned, shares, strict=True))
        for batch in fetched:
            assert_same(batch, window.select(shares[rank]))
    assert len(sent) == len({(sender, to) for sender, to, _ in sent}), "the second time nothing moves"


def test_images_move_only_with_their_rollouts_and_once():
    def fetch(rank, processes):
        own, index = pool(batch_of(rank, images=True), processes)
        # rollouts 0 to 3 lie on process 0; 0 and 1 show one image, 2 and 3 another; 0, 1 and 2 move, one at a time
        for moving in (0, 1, 2):
            shares = [torch.tensor([3]), torch.tensor([moving])]
            own.fetch(index, shares, processes)

    _, sent = together(2, fetch)
    assert [(sender, to) for sender, to, _ in sent] == [(0, 1)] * 3
    images = [[one.tensors["pixel_values"].tolist() for one in new.values()] for _, _, (_, _, new) in sent]
    assert images == [[[[0.0] * 4]], [], [[[0.0] * 4]]]


def test_rollouts_without_signal_are_dropped():
    """Of 1, 2, 3 and 4 tokens on process 0 and 2, 3, 4 and 5 on process 1, the first three of each have a signal."""
    batches = [batch_of(rank) for rank in range(2)]
    for batch in batches:
        batch.advantages = torch.where(torch.arange(batch.num_tokens) < 3, 1.0, 0.0)
        batch.term_tokens = {}
    index = join_indexes([RolloutIndex.of(one, rank) for rank, one in enumerate(batches)]).without_signal_dropped()
    assert index.lengths.tolist() == [1, 2, 2, 3]
    assert (index.skipped_tokens, index.skipped_rows) == (3 + 4 + 4 + 5, 4)
    for batch in batches:
        batch.advantages = torch.zeros(batch.num_tokens)
    nothing = join_indexes([RolloutIndex.of(one, rank) for rank, one in enumerate(batches)]).without_signal_dropped()
    assert nothing.lengths.tolist() == [1]  # the shortest stays


@pytest.mark.filterwarnings("error")
def test_tensors_in_messages_arrive_bit_by_bit_and_once():
    shared = torch.tensor([[1.0, float("nan")], [-0.0, 3.0]], dtype=torch.bfloat16)
    sent = {
        "shared": [shared, shared],
        "turned": torch.arange(6).view(2, 3).t(),
        "flag": torch.tensor(True),
        "none": (),
        "array": np.frombuffer(b"read-only", np.uint8),  # as a row of a dataset may have it
    }
    message = pack(sent)
    got = unpack(torch.cat([message, torch.zeros(5, dtype=torch.uint8)]))  # padded, as `gather` sends it
    assert got["shared"][0] is got["shared"][1]
    assert torch.equal(got["shared"][0].view(torch.int16), shared.view(torch.int16))
    assert torch.equal(got["turned"], sent["turned"]) and got["flag"].item() is True and got["none"] == ()
    assert got["array"].tobytes() == b"read-only"


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def buffers(batches):
    """The buffer of each process, after its first micro-step."""

    def fill(rank, processes):
        buffer = RolloutBuffer()
        buffer.append(*pool(batches[rank], processes), [torch.tensor([0, 4]), torch.tensor([1, 5])], 1)
        buffer.take(1)
        return buffer

    return together(2, fill)[0]


def test_a_resumed_process_has_its_rollouts_and_the_sizes_of_all():
    batches = [batch_of(rank, images=True) for rank in range(2)]
    for rank, buffer in enumerate(buffers(batches)):
        resumed = RolloutBuffer()
        resumed.load_state_dict(buffer.state_dict(), torch.device("cpu"), rank)
        (part,), (expected,) = resumed.take(1), buffer.take(1)
        assert_same(part.own.batch, batches[rank])
        assert part.index.owners.tolist() == [0, 1] and part.index.rows.tolist() == [1, 1]
        assert part.tokens == expected.tokens and torch.equal(part.index.prompt_keys, expected.index.prompt_keys)


def test_rollouts_of_another_process_are_not_resumed():
    buffer = buffers([batch_of(0), batch_of(1)])[0]
    resumed = RolloutBuffer()
    resumed.load_state_dict(buffer.state_dict(), torch.device("cpu"), 1)
    with pytest.raises(ValueError, match="save_only_model"):
        resumed.take(1)


def test_a_rollout_batch_that_is_used_up_is_not_resumed():
    """Version 0.1 wrote it into checkpoints at the end of its last step."""
    buffer = buffers([batch_of(0), batch_of(1)])[0]
    resumed = RolloutBuffer()
    resumed.load_state_dict({**buffer.state_dict(), "taken": 2}, torch.device("cpu"), 0)
    assert resumed.left == 0 and resumed.batches == []
