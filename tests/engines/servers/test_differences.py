"""Weights as differences: what is decoded is what was sent, bit for bit, in as few bytes as the positions allow."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.core.engine import TensorSpec, WeightUpdate
from covey.engines.servers.weights import differences
from covey.engines.servers.weights.buckets import Labels, Receiver, pack, unpack
from covey.engines.servers.weights.differences import HeldWeights, Section, aligned, bits_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.bool]


def update(*tensors, version=3):
    named = [(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named)
    return WeightUpdate(version, specs, lambda: iter(named))


def copy_of(*tensors, label="a"):
    return HeldWeights(label, {f"t{i}": tensor.clone() for i, tensor in enumerate(tensors)})


def encoded(old, new):
    """Sections and bytes of a difference."""
    out = torch.zeros(aligned(new.nbytes), dtype=torch.uint8)
    sections, used = copy_of(old).encode("t0", new, out)
    return sections, out[:used]


def decoded(old, new, sections, data):
    spec = TensorSpec("t0", tuple(new.shape), new.dtype)
    return copy_of(old).decode(spec, sections, data)


def with_changes(n, positions, dtype=torch.bfloat16):
    """Zeros [n], and the same with ones at `positions`."""
    old = torch.zeros(n, dtype=dtype)
    new = old.clone()
    new[positions] = 1
    return old, new


def test_gaps_are_words_that_continue_after_a_word_of_ones():
    gaps = torch.tensor([0, 254, 255, 300, 600])
    # 0 | 254 | 255 + 0 | 255 + 45 | 255 + 255 + 90
    assert differences._pack_gaps(gaps, 1).tolist() == [0, 254, 255, 0, 255, 45, 255, 255, 90]
    # each number lies one after its gap: 0, 0 + 1 + 254 = 255, 255 + 1 + 255 = 511, ...
    assert differences._unpack_gaps(differences._pack_gaps(gaps, 1), 1).tolist() == [0, 255, 511, 812, 1413]
    # low byte first: 300 = 44 + 256, 65535 = ones and 0
    assert differences._pack_gaps(torch.tensor([300, 65535]), 2).tolist() == [44, 1, 255, 255, 0, 0]


def test_a_mask_has_a_bit_for_each_number():
    assert differences._pack_mask(torch.tensor([True, False, True] + 6 * [False] + [True])).tolist() == [5, 2]


@pytest.mark.parametrize(
    ("n", "positions", "section"),
    [
        (1000, [0], Section("gaps1", 1, 1)),
        (100_000, [60_000], Section("gaps2", 1, 2)),  # one word of two bytes, or 236 of one
        (1000, [400, 999], Section("gaps2", 2, 4)),  # of one byte: 255 + 145 and 255 + 255 + 88, five words
        (80, slice(0, 80, 4), Section("mask", 20, 10)),  # 20 gaps are 20 bytes
        (80, slice(0, 79), Section("whole", 80, 0)),  # 158 + 10 bytes instead of 160
        (80, slice(0, 0), Section("gaps1", 0, 0)),
    ],
)
def test_the_shortest_encoding_is_chosen(n, positions, section):
    old, new = with_changes(n, positions)
    [found], data = encoded(old, new)
    assert found == section and len(data) == aligned(2 * section.changed + section.nbytes)
    assert torch.equal(decoded(old, new, (found,), data), new)


@given(
    dtype=st.sampled_from(DTYPES),
    n=st.integers(0, 700),
    share=st.sampled_from([0.0, 0.003, 0.03, 0.3, 1.0]),
    seed=st.integers(0, 10**6),
    section=st.sampled_from([64, 256, 2**24]),
)
def test_any_difference_is_decoded_to_the_bit(dtype, n, share, seed, section):
    torch.manual_seed(seed)
    raw = torch.randint(0, 256, (n, dtype.itemsize), dtype=torch.uint8)  # NaNs of all kinds among them
    other = torch.where(torch.rand(n, 1) < share, torch.randint(0, 256, raw.shape, dtype=torch.uint8), raw)
    if dtype == torch.bool:
        raw, other = raw & 1, other & 1
    old, new = raw.view(-1).view(dtype), other.view(-1).view(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differences, "SECTION", section)
        sections, data = encoded(old, new)
        assert len(data) <= aligned(new.nbytes) and len(sections) == -(-n // section)
        assert torch.equal(bits_of(decoded(old, new, sections, data)), bits_of(new))


def test_zeros_of_another_sign_and_nans_with_other_bits_are_changes():
    old = torch.tensor([0.0, torch.nan, 1.0]).bfloat16()
    new = torch.tensor([-0.0, torch.nan, 1.0]).bfloat16()
    new.view(torch.int16)[1] ^= 1
    [section], data = encoded(old, new)
    assert section.kind == "whole" or section.changed == 2
    assert bits_of(decoded(old, new, (section,), data)).tolist() == bits_of(new).tolist()


def test_encoding_brings_the_copy_up_to_date():
    old, new = with_changes(1000, [3, 500])
    held = copy_of(old)
    held.encode("t0", new, torch.zeros(2000, dtype=torch.uint8))
    assert torch.equal(held.tensors["t0"], new)


def test_a_tensor_that_is_not_contiguous_is_sent_as_it_is_read():
    old = torch.zeros(30, 20).bfloat16()
    new = old.clone()
    new[3, 4] = 1.0
    [section], data = encoded(old.t().contiguous(), new.t())
    assert section.changed == 1
    assert torch.equal(decoded(old.t().contiguous(), new.t(), (section,), data), new.t())


@pytest.mark.parametrize(
    "sections",
    [
        (),  # too few
        (Section("gaps1", 1, 1),) * 2,
        (Section("gaps1", 2, 1),),  # one position
        (Section("gaps1", 1, 999),),  # beyond the bytes
        (Section("gaps1", -1, 1),),
        (Section("gaps2", 1, 1),),
        (Section("mask", 1, 1),),  # of no number: the byte is 0
        (Section("whole", 7, 0),),
        (Section("anything", 1, 1),),
    ],
)
def test_sections_that_do_not_fit_are_refused(sections):
    old, new = with_changes(1000, [0])
    _, data = encoded(old, new)
    data[2] = 0
    with pytest.raises(ValueError, match=r"t0|Section"):
        decoded(old, new, sections, data)


def test_a_position_behind_the_end_is_refused():
    old, new = with_changes(16, [15])
    data = torch.tensor([0, 0, 16], dtype=torch.uint8)  # a value, and a gap of 16
    with pytest.raises(ValueError, match="1 of 16"):
        decoded(old, new, (Section("gaps1", 1, 1),), data)


# ---- in buckets ------------------------------------------------------------------------------------------------------


def deliver(receiver, sent, *, held, labels, bucket_bytes=400):
    """Tensors as a server gets them, and the bytes on the way."""
    taken, nbytes = [], 0
    for bucket in pack(sent, bucket_bytes, held=held, labels=labels):
        manifest = json.loads(json.dumps(bucket.manifest()))
        taken += [
            (name, tensor.clone()) for name, tensor in receiver.take(manifest, bucket.data.clone(), bucket.number)
        ]
        nbytes += bucket.data.numel()
    receiver.finish()
    return taken, nbytes


def test_updates_arrive_in_few_bytes_and_to_the_bit():
    torch.manual_seed(0)
    weights = [torch.randn(300).bfloat16(), torch.randn(7), torch.randn(10, 10).bfloat16()]
    trainer, receiver = HeldWeights(), Receiver()
    _, first = deliver(receiver, update(*weights), held=trainer, labels=Labels("v0"))
    for version in range(1, 6):
        for tensor in weights:
            tensor.view(-1)[version] += 1.0
        before = trainer.label
        taken, nbytes = deliver(receiver, update(*weights), held=trainer, labels=Labels(f"v{version}", before))
        assert nbytes == 3 * 16 < first == 608 + 32 + 208
        assert [name for name, _ in taken] == ["t0", "t1", "t2"]
        assert all(torch.equal(tensor, weights[i]) for i, (_, tensor) in enumerate(taken))
        assert trainer.label == receiver.held.label == f"v{version}"


def test_an_update_without_changes_still_has_bytes_to_broadcast():
    weights = [torch.randn(300).bfloat16()]
    trainer, receiver = HeldWeights(), Receiver()
    deliver(receiver, update(*weights), held=trainer, labels=Labels("a"))
    taken, nbytes = deliver(receiver, update(*weights), held=trainer, labels=Labels("b", "a"))
    assert nbytes == 16 and torch.equal(taken[0][1], weights[0])


def test_copies_are_as_large_as_the_weights():
    weights = [torch.randn(300).bfloat16(), torch.randn(7)]
    trainer, receiver = HeldWeights(), Receiver()
    deliver(receiver, update(*weights), held=trainer, labels=Labels("a"))
    for copy in (trainer, receiver.held):
        assert sum(tensor.untyped_storage().nbytes() for tensor in copy.tensors.values()) == 628


def test_processes_of_a_server_share_a_copy_without_a_name(tmp_path):
    torch.manual_seed(0)
    weights = [torch.randn(300).bfloat16(), torch.randn(7), torch.zeros(0, 3)]
    trainer, receivers = HeldWeights(), [Receiver(tmp_path), Receiver(tmp_path)]
    for version in range(3):
        weights[0][version] += 1.0
        base = trainer.label
        for bucket in pack(update(*weights), 400, held=trainer, labels=Labels(f"v{version}", base)):
            for receiver in receivers:
                taken = receiver.take(bucket.manifest(), bucket.data.clone(), bucket.number)
                assert all(torch.equal(tensor, weights[int(name[1:])]) for name, tensor in taken)
        for receiver in receivers:
            receiver.finish()
        assert not list(tmp_path.iterdir())
    first, second = (receiver.held.tensors["t0"] for receiver in receivers)
    first[7] = 99.0
    assert second[7] == 99.0


def test_where_the_shared_memory_is_full_each_process_has_a_copy(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(differences.os, "posix_fallocate", full)
    weights = [torch.randn(300).bfloat16()]
    receiver = Receiver(tmp_path)
    taken, _ = deliver(receiver, update(*weights), held=HeldWeights(), labels=Labels("a"))
    assert torch.equal(taken[0][1], weights[0]) and not list(tmp_path.iterdir())


def test_a_label_that_is_no_word_is_refused(tmp_path):
    bucket = next(pack(update(torch.zeros(3)), 400, held=HeldWeights(), labels=Labels("../x")))
    with pytest.raises(ValueError, match="letters and digits"):
        Receiver(tmp_path).take(bucket.manifest(), bucket.data, 0)


def test_another_bit_in_the_servers_copy_is_noticed():
    weights = [torch.zeros(300).bfloat16()]
    trainer, receiver = HeldWeights(), Receiver()
    deliver(receiver, update(*weights), held=trainer, labels=Labels("a"))
    receiver.held.tensors["t0"].view(torch.int16)[77] ^= 1
    weights[0][3] = 1.0
    with pytest.raises(ValueError, match="'t0'"):
        deliver(receiver, update(*weights), held=trainer, labels=Labels("b", "a"))
    assert receiver.held.label is None  # nothing is a difference from what it is now
    with pytest.raises(ValueError, match="holds None"):
        deliver(receiver, update(*weights), held=trainer, labels=Labels("c", "b"))


def test_differences_to_another_content_are_refused():
    weights = [torch.zeros(300).bfloat16()]
    one, other, receiver = HeldWeights(), HeldWeights(), Receiver()
    deliver(receiver, update(*weights), held=one, labels=Labels("a"))
    deliver(Receiver(), update(*weights), held=other, labels=Labels("z"))
    with pytest.raises(ValueError, match=r"z .*holds a"):
        deliver(receiver, update(*weights), held=other, labels=Labels("b", "z"))


def test_an_update_that_breaks_off_leaves_no_content_to_differ_from():
    weights = [torch.zeros(300).bfloat16(), torch.zeros(300).bfloat16()]
    trainer, receiver = HeldWeights(), Receiver()
    deliver(receiver, update(*weights), held=trainer, labels=Labels("a"))
    bucket = next(pack(update(*weights), 400, held=trainer, labels=Labels("b", "a")))
    receiver.take(bucket.manifest(), bucket.data, 0)
    assert trainer.label is None and receiver.held.label is None


def test_a_server_whose_trainer_sends_no_differences_keeps_no_copy():
    weights = [torch.zeros(300).bfloat16()]
    receiver = Receiver()
    deliver(receiver, update(*weights), held=HeldWeights(), labels=Labels("a"))
    deliver(receiver, update(*weights), held=None, labels=None)
    assert receiver.held is None


def test_a_difference_without_a_copy_is_refused():
    weights = [torch.zeros(300).bfloat16()]
    trainer = copy_of(*weights)
    bucket = next(pack(update(*weights), 10**6, held=trainer, labels=Labels("b", "a")))
    with pytest.raises(ValueError, match="holds no weights"):
        unpack(bucket.manifest(), bucket.data)


@pytest.mark.parametrize("change", [{"sections": [["gaps1"]]}, {"sections": 7}, {"nbytes": 10**9}, {"nbytes": -1}])
def test_a_manifest_of_differences_is_checked(change):
    weights = [torch.zeros(300).bfloat16()]
    trainer, server = copy_of(*weights), copy_of(*weights)
    bucket = next(pack(update(*weights), 10**6, held=trainer, labels=Labels("b", "a")))
    manifest = bucket.manifest()
    manifest["tensors"][0] |= change
    with pytest.raises(ValueError, match=r"manifest|t0"):
        unpack(manifest, bucket.data, server)
