"""Rows that do not fill a rollout batch begin the next epoch, where nothing is shuffled."""

from covey.data.sampler import GenerationSampler, TrainingStream
from tests.support import runs


def sizes(tmp_path):
    return runs.config(tmp_path, num_generations=2, per_device_train_batch_size=4).algebra(1)  # 4 prompts a batch


def test_an_unshuffled_epoch_begins_where_the_last_one_ended(tmp_path):
    sampler = GenerationSampler(10, sizes(tmp_path), 0, shuffle=False, seed=0)
    drawn = [sorted({row for row, _ in sampler.slots(rollout_batch)}) for rollout_batch in range(5)]
    assert drawn == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_stream_keeps_what_did_not_fill_a_batch(tmp_path):
    stream = TrainingStream([{"prompt": str(i)} for i in range(10)], sizes(tmp_path), 0)
    rollout_batches = stream.rollout_batches()
    drawn = [sorted({sample.prompt for sample in next(rollout_batches)}) for _ in range(5)]
    assert drawn == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9], [2, 3, 4, 5], [6, 7, 8, 9]]
